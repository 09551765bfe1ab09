"""Sleep for the CPU, whose workers have none of their own, and what is played with it or on a GPU.

As vLLM says it: at level 1 the weights come back as they were, at level 2 they are lost; what the
KV cache held is gone at both. Lost memory holds numbers that are wrong and not huge.
"""

from __future__ import annotations

from typing import Any

from scenarios import Stage, cached_of, prompts, runner, tokens_of

_GONE = 0.75
_SAVED = "_test_saved_weights"


def install() -> None:
    """Workers of this process, and those forked from it, fall asleep from now on."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_worker import CPUWorker

    CpuPlatform.is_sleep_mode_available = lambda *_: True
    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _parameters(worker: Any) -> dict[str, Any]:
    return {name: one.data for name, one in worker.model_runner.get_model().named_parameters()}


def _sleep(worker: Any, level: int = 1) -> None:
    saved = {name: data.clone() for name, data in _parameters(worker).items()}
    setattr(worker, _SAVED, saved if level == 1 else {})
    for data in _parameters(worker).values():
        data.fill_(_GONE)
    lose_cache(worker)


def lose_cache(worker: Any) -> None:
    """Memory that was given back and taken again holds something else."""
    for tensor in worker.model_runner.kv_caches:
        tensor.fill_(_GONE)


def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    if tags is None or "weights" in tags:
        for name, data in getattr(worker, _SAVED).items():
            _parameters(worker)[name].copy_(data)


def retrain(worker: Any, seed: int) -> None:
    """As a trainer that writes on the model: the weights of a seed, whatever they were.

    On a GPU all of them are lost at level 2, those of norms included.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, data in _parameters(worker).items():
        if "norm" in name:
            data.fill_(1.0)
        elif data.numel():
            gain = 4.0 if "v_proj" in name or "qkv" in name else 1.0
            noise = torch.randn(data.shape, generator=generator)
            data.copy_(gain / data.shape[-1] ** 0.5 * noise)


def update_weights(worker: Any, seed: int) -> None:
    """The same, by a name that says so."""
    retrain(worker, seed)


def sleeps_twice(stage: Stage) -> dict[str, Any]:
    """`sleeps`, with everything asked twice: the second time the GPU's own cache has it."""
    played = sleeps(stage, times=2)
    about = {"tier": stage.tier_stats(), "runner": stage.llm.collective_rpc(runner)[0]}
    return {**played, **about}


def sleeps(stage: Stage, times: int = 1) -> dict[str, Any]:
    """The same prompts, asked again after sleep of all kinds and with other weights."""
    asked, seen = prompts(31, 4, 420), _Seen(stage)
    llm = stage.llm

    def again(name: str) -> None:
        seen.play(name, asked)
        if times == 2:
            seen.play(f"{name}, twice", asked)
        stage.push_out(310)

    def nap(level: int, seed: int | None = None) -> None:
        llm.sleep(level=level)
        if seed is not None:
            llm.wake_up(tags=["weights"])
            llm.collective_rpc(retrain, args=(seed,))
            llm.wake_up(tags=["kv_cache"])
        else:
            llm.wake_up()

    again("first")
    nap(1)
    again("level 1")
    nap(1)
    llm.sleep(level=1)
    nap(1)
    again("level 1, three times")
    nap(0)
    again("level 0")
    nap(1, seed=5)
    again("other weights")
    nap(1)
    again("other weights, level 1")
    nap(2, seed=6)
    again("level 2")
    llm.reset_prefix_cache()
    again("reset")
    return seen.result()


def updates(stage: Stage) -> dict[str, Any]:
    """Weights that are updated while the engine is awake, with and without a reset."""
    asked, seen = prompts(32, 3, 420), _Seen(stage)
    llm = stage.llm
    seen.play("first", asked)
    stage.push_out(320)
    seen.play("again", asked)
    llm.collective_rpc(update_weights, args=(7,))
    seen.play("as vLLM has them", asked)
    stage.push_out(321)
    seen.play("updated", asked)
    stage.push_out(322)
    seen.play("updated, no reset", asked)
    llm.reset_prefix_cache()
    stage.push_out(323)
    seen.play("reset", asked)
    stage.push_out(324)
    seen.play("reset, again", asked)
    llm.reset_prefix_cache()
    llm.collective_rpc(update_weights, args=(8,))
    seen.play("reset, then updated", asked)
    stage.push_out(325)
    seen.play("updated, again", asked)
    return seen.result()


class _Seen:
    """Answers, and tokens found cached, by the moment at which prompts were asked."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._tokens: dict[str, Any] = {}
        self._cached: dict[str, int] = {}

    def play(self, name: str, asked: list[list[int]]) -> None:
        """Ask, one prompt after the other."""
        outputs = [self._stage.play([prompt])[0] for prompt in asked]
        self._tokens[name] = tokens_of(outputs)
        self._cached[name] = sum(cached_of(outputs))

    def result(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "cached": self._cached}
