"""Installing, rolling back, removing, and living with other wrappers and other processes."""

from __future__ import annotations

import pytest


def test_removal_restores_the_very_same_raw_objects(host):
    host.run(
        """
        import fakehost.alpha as alpha
        p = patches(STEP, MAKE)
        p.arm()
        for name in ("step", "make"):
            assert vars(alpha.Engine)[name] is not alpha.ORIGINALS[name]
        assert alpha.Engine().make(2) == ("hooked", [2])
        p.remove()
        for name in ("step", "make"):
            assert vars(alpha.Engine)[name] is alpha.ORIGINALS[name]
        """
    )


def test_hook_gets_bound_function_instance_and_arguments(host):
    host.run(
        """
        import hooks, fakehost.alpha as alpha
        patches(STEP, MAKE).arm()
        engine = alpha.Engine()
        assert engine.step(1, count=5) == ("hooked", (1, 5))
        assert hooks.calls == [("step", engine, (1,), {"count": 5})]
        engine.make(3)
        assert hooks.calls[1] == ("make", engine, (3,), {})
        """
    )


def test_hook_exception_reaches_the_caller_and_changes_nothing(host):
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        p = patches(dataclasses.replace(STEP, hook="hooks:fail"))
        p.arm()
        assert refused(LookupError, alpha.Engine().step, 1) == "from the hook"
        assert p.status()["state"] == "installed" and p.enabled()
        """
    )


def test_inherited_attribute_is_deleted_again(host):
    host.run(
        """
        import fakehost.alpha as alpha
        original = vars(alpha.Base)["inherited"]
        p = patches(INHERITED)
        p.arm()
        assert alpha.Engine().inherited(1) == ("hooked", 1)
        assert alpha.Base().inherited(1) == 1
        p.remove()
        assert "inherited" not in vars(alpha.Engine)
        assert vars(alpha.Base)["inherited"] is original
        """
    )


def test_aliases_held_elsewhere(host):
    host.run(
        """
        from fakehost.alpha import Engine
        early = Engine.step  # a function taken before stays what it was
        engine = Engine()
        p = patches(STEP)
        p.arm()
        late = engine.step  # a bound wrapper taken while installed
        assert early(engine, 1) == (1, 1)
        assert Engine().step(1) == engine.step(1) == late(1) == ("hooked", (1, 1))
        p.remove()
        assert late(1) == engine.step(1) == (1, 1)
        assert Engine.step is early
        """
    )


def test_wrapper_on_top_stays_and_ours_passes_through(host):
    host.run(
        """
        import functools, hooks, fakehost.alpha as alpha
        p = patches(STEP)
        p.arm()
        ours = vars(alpha.Engine)["step"]
        below = alpha.Engine.step
        @functools.wraps(below)
        def theirs(*args, **kwargs):
            return ("theirs", below(*args, **kwargs))
        alpha.Engine.step = theirs
        assert alpha.Engine().step(1) == ("theirs", ("hooked", (1, 1)))
        p.remove()
        assert vars(alpha.Engine)["step"] is theirs and not p.enabled()
        count = len(hooks.calls)
        assert alpha.Engine().step(1) == ("theirs", (1, 1)) and len(hooks.calls) == count
        p = patches(STEP, allow_unverified=True)
        p.arm()  # a new wrapper on top; the old one below must not run the hook a second time
        assert alpha.Engine().step(1) == ("hooked", ("theirs", (1, 1)))
        assert ours is not vars(alpha.Engine)["step"]
        p.remove()
        assert vars(alpha.Engine)["step"] is theirs
        assert alpha.Engine().step(1) == ("theirs", (1, 1))
        """
    )


WRAPPED_BY_OTHERS = """
        import functools, fakehost.alpha as alpha
        def wrap(function):
            @functools.wraps(function)
            def theirs(*args, **kwargs):
                return ("theirs", function(*args, **kwargs))
            return theirs
        theirs = alpha.Engine.step = wrap(alpha.Engine.step)
"""


def test_a_foreign_wrapper_below_is_refused(host):
    host.run(
        WRAPPED_BY_OTHERS
        + """
        text = refused(UnverifiedHost, patches(STEP).arm)
        assert text == (
            "FakeHost 1.2.3 is refused: scheduler.step was replaced by "
            "__main__.wrap.<locals>.theirs. Nothing was patched; use 1.x, or allow it to patch it "
            "all the same."
        ) or sys.version_info < (3, 11), text
        assert vars(alpha.Engine)["step"] is theirs
        """
    )


def test_a_foreign_wrapper_below_is_taken_if_the_user_wants_it_and_said_in_the_log(host):
    host.run(
        WRAPPED_BY_OTHERS
        + """
        import logging
        said = []
        logging.getLogger().addHandler(type("H", (logging.Handler,), {
            "emit": lambda self, record: said.append((record.levelname, record.getMessage()))})())
        p = patches(STEP, allow_unverified=True)
        p.arm()
        assert alpha.Engine().step(1) == ("hooked", ("theirs", (1, 1)))
        ((level, text),) = said
        assert level == "WARNING", said
        assert text.startswith("FakeHost 1.2.3 is patched all the same: scheduler.step was "), text
        p.remove()
        assert vars(alpha.Engine)["step"] is theirs
        """
    )


@pytest.mark.parametrize("how", ["proxy", "copied name", "callable object", "lambda"])
def test_a_replacement_is_seen_in_whatever_dress(host, how):
    host.run(
        f"""
        import fakehost.alpha as alpha, wrapt
        plain = alpha.Engine.step
        def copied(self, request, count=1): return 0
        copied.__module__, copied.__qualname__ = plain.__module__, plain.__qualname__
        class Callable:
            def __call__(self, request, count=1): return 0
            __signature__ = __import__("inspect").signature(plain)
        alpha.Engine.step = {{
            "proxy": wrapt.FunctionWrapper(plain, lambda w, i, a, k: w(*a, **k)),
            "copied name": copied,
            "callable object": Callable(),
            "lambda": lambda self, request, count=1: 0,
        }}[{how!r}]
        text = refused(UnverifiedHost, patches(STEP).arm)
        assert "scheduler.step was replaced by" in text, text
        """
    )


@pytest.mark.parametrize(
    "how",
    ["executed", "executed as if from there", "made", "renamed", "code", "constants"],
)
@pytest.mark.parametrize("point", ["STEP", "INHERITED"])
def test_a_replacement_with_the_globals_of_the_module_is_seen(host, how, point):
    host.run(
        f"""
        import fakehost.alpha as alpha, types
        name = {point}.attribute.partition(".")[2]
        owner = next(c for c in alpha.Engine.__mro__ if name in vars(c))
        plain, other = vars(owner)[name], lambda self, request, count=1: 0
        other = other if name == "step" else lambda self, x: 0
        text = f"def {{name}}{{'(self, request, count=1)' * (name == 'step') or '(self, x)'}}: pass"
        def execute(text, file):
            found = {{}}
            exec(compile(text, file, "exec"), vars(alpha), found)
            return found[name]
        lines = chr(10) * (plain.__code__.co_firstlineno - 1)
        made = {{
            "executed": lambda: execute(text, "<string>"),
            "executed as if from there": lambda: execute(lines + text, alpha.__file__),
            "made": lambda: types.FunctionType(other.__code__, vars(alpha), name, (1,)),
            "renamed": lambda: execute(text.replace("pass", "return 0"), alpha.__file__),
            "code": lambda: setattr(plain, "__code__", other.__code__),
            "constants": lambda: setattr(plain, "__code__", plain.__code__.replace(co_consts=(7,))),
        }}[{how!r}]()
        if made is not None:
            assert made.__globals__ is vars(alpha)
            made.__defaults__ = plain.__defaults__
            setattr(owner, name, made)
        text = refused(UnverifiedHost, patches({point}).arm)
        assert f"scheduler.{{name}} was replaced by" in text, text
        """
    )


def test_a_module_without_a_source_to_compare_with_is_refused(host):
    host.run(
        """
        import fakehost.alpha as alpha, os
        patch_set = patches(STEP)
        os.remove(alpha.__file__)
        assert "scheduler.step was replaced by" in refused(UnverifiedHost, patch_set.arm)
        """
    )


def test_a_decorator_of_the_hosts_own_source_is_no_replacement(host):
    host.write(
        "tools.py",
        "import functools\n"
        "def decorated(function):\n"
        "    @functools.wraps(function)\n"
        "    def around(*args, **kwargs): return function(*args, **kwargs)\n"
        "    return around\n",
    )
    host.replace("fakehost/alpha.py", "class Base:", "from tools import decorated\nclass Base:")
    host.replace("fakehost/alpha.py", "    def step", "    @decorated\n    def step")
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        text = refused(UnverifiedHost, patches(STEP).arm)
        patches(STEP).remove()
        known = dataclasses.replace(STEP, wrappers=("tools",))
        patches(known).arm()
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        """
    )


def test_what_the_hosts_own_source_takes_from_another_module_is_no_replacement(host):
    host.replace("fakehost/alpha.py", "class Base:", "import fakehost.newer as newer\nclass Base:")
    host.write(
        "fakehost/newer.py", "class Engine:\n    def step(self, request, count=1): return 7\n"
    )
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        alpha.Engine = alpha.newer.Engine
        text = refused(UnverifiedHost, patches(STEP).arm)
        # Python 3.10 and older know a function's own name alone.
        assert "was replaced by fakehost.newer." in text and "step. Nothing was" in text, text
        patches(STEP).remove()
        patches(dataclasses.replace(STEP, aliased=("fakehost.newer", "never.imported"))).arm()
        assert alpha.Engine().step(1)[0] == "hooked"
        """
    )


@pytest.mark.parametrize(
    ("replacement", "found"),
    [
        ("staticmethod(lambda self, request: 0)", "is a static method"),
        ("classmethod(lambda self, request: 0)", "is a class method"),
        ("later", "is a coroutine function"),
        ("dict", "does not tell its parameters"),
        ("lambda self, request, more: 0", "has the required parameter more"),
        ("lambda self, *, request: 0", "takes (self, request), expected (self, request)"),
    ],
)
def test_what_cannot_be_wrapped_right_is_refused_whatever_the_user_wants(host, replacement, found):
    host.run(
        f"""
        import fakehost.alpha as alpha
        async def later(self, request): return 0
        alpha.Engine.step = {replacement}
        text = refused(SignatureMismatch, patches(STEP, allow_unverified=True).arm)
        assert {found!r} in text, text
        """
    )


def test_foreign_wrapper_with_other_parameters_is_refused_by_name(host):
    host.run(
        """
        import fakehost.alpha as alpha, fakehost.beta as beta
        def foreign(self, *args):
            return None
        alpha.Engine.step = foreign
        p = patches(EXECUTE, STEP)
        text = refused(SignatureMismatch, p.arm)
        assert text == (
            "FakeHost 1.2.3 does not match the patch table: scheduler.step takes (self), "
            "expected (self, request) (it is now __main__.foreign). "
            "Nothing was patched; use 1.x."
        ), text
        assert vars(alpha.Engine)["step"] is foreign
        assert vars(beta.Worker)["execute"] is beta.ORIGINALS["execute"]
        assert p.status()["state"] == "failed" and p.status()["refusal"] == text
        """
    )


def test_target_missing_at_install_is_refused(host):
    host.run(
        """
        import fakehost.alpha as alpha
        p = patches(STEP)
        del alpha.Engine
        text = refused(SignatureMismatch, p.arm)
        assert "scheduler.step not found in the imported fakehost.alpha" in text, text
        """
    )


@pytest.mark.parametrize("broken", ["hooks:no_such_function", "no_such_module:hook"])
@pytest.mark.parametrize("second", ["EXECUTE", "MAKE"])  # in another module, in the same one
def test_second_point_fails_and_the_first_is_rolled_back(host, second, broken):
    host.run(
        f"""
        import dataclasses, fakehost.alpha as alpha, fakehost.beta as beta
        p = patches(STEP, dataclasses.replace({second}, hook={broken!r}))
        text = refused(InstallFailed, p.arm)
        assert text.startswith("FakeHost 1.2.3 cannot be patched: installing in fakehost."), text
        again = "reinstall kvoffload_patch, or " if "Module" in text else ""
        assert "no_such" in text and text.endswith(f"Nothing stays patched; {{again}}use 1.x.")
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        assert vars(alpha.Engine)["make"] is alpha.ORIGINALS["make"]
        assert vars(beta.Worker)["execute"] is beta.ORIGINALS["execute"]
        assert p.status()["state"] == "failed" and not p.enabled() and not installed(p)
        assert refused(InstallFailed, p.arm) == text
        """
    )


def test_assignment_that_raises_rolls_back_what_was_assigned(host):
    host.replace("fakehost/alpha.py", "class Engine(Base):", "class Engine(Base, metaclass=Meta):")
    host.replace(
        "fakehost/alpha.py",
        "class Base:",
        "class Meta(type):\n"
        "    def __setattr__(cls, name, value):\n"
        "        if name == 'make': raise TypeError('make is final')\n"
        "        super().__setattr__(name, value)\n"
        "class Base:",
    )
    host.run(
        """
        import fakehost.alpha as alpha
        text = refused(InstallFailed, patches(STEP, MAKE, INHERITED).arm)
        assert "TypeError (make is final)" in text, text
        for name in ("step", "make"):
            assert vars(alpha.Engine)[name] is alpha.ORIGINALS[name]
        """
    )


def test_refusal_at_import_is_sticky_until_removed(host):
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        p = patches(STEP, dataclasses.replace(EXECUTE, hook="hooks:missing"))
        p.arm()
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        texts = {refused(InstallFailed, load, "fakehost.beta") for _ in range(3)}
        assert len(texts) == 1, texts
        assert "fakehost.beta" not in sys.modules
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        assert p.status()["refusal"] == texts.pop()
        p.remove()
        assert p.status()["state"] == "removed" and p.status()["refusal"] is None
        assert load("fakehost.beta").Worker().execute(1) == 1
        """
    )


def test_after_a_refusal_other_target_modules_refuse_too(host):
    host.run(
        """
        import dataclasses
        p = patches(dataclasses.replace(STEP, hook="hooks:missing"), EXECUTE)
        p.arm()
        text = refused(InstallFailed, load, "fakehost.alpha")
        assert refused(InstallFailed, load, "fakehost.beta") == text
        """
    )


def test_host_module_that_fails_on_its_own_is_patched_at_the_next_attempt(host):
    host.replace("fakehost/alpha.py", "class Base:", "import attempt\nclass Base:")
    host.run(
        """
        import types
        p = patches(STEP)
        p.arm()
        refused(ModuleNotFoundError, load, "fakehost.alpha")
        assert p.status()["state"] == "armed"
        sys.modules["attempt"] = types.ModuleType("attempt")
        assert load("fakehost.alpha").Engine().step(1) == ("hooked", (1, 1))
        """
    )


def test_arming_while_the_target_is_half_imported(host):
    host.write("during.py", "from harness import *\ntext = refused(InstallFailed, patches().arm)\n")
    host.replace("fakehost/alpha.py", "class Base:", "import during\nclass Base:")
    host.run(
        """
        import fakehost.alpha as alpha, during
        assert "while fakehost.alpha is being imported" in during.text, during.text
        assert alpha.Engine().step(1) == (1, 1)
        p = patches()
        assert p.status()["state"] == "idle"
        p.arm()
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        """
    )


def test_arming_waits_for_an_import_in_another_thread(host):
    host.write("slow.py", "import time\ntime.sleep(0.4)\n")
    host.replace("fakehost/alpha.py", "class Base:", "import slow\nclass Base:")
    host.run(
        """
        import threading, time
        thread = threading.Thread(target=load, args=("fakehost.alpha",))
        thread.start()
        while "slow" not in sys.modules:
            time.sleep(0.01)
        p = patches(STEP)
        p.arm()
        thread.join()
        assert sys.modules["fakehost.alpha"].Engine().step(1) == ("hooked", (1, 1))
        """
    )


def test_arming_while_the_top_level_package_is_imported(host):
    host.write("fakehost/__init__.py", "from harness import patches\npatches().arm()\n")
    host.run(
        """
        import fakehost.alpha as alpha, fakehost.beta as beta
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        assert beta.Worker().execute(1) == ("hooked", 1)
        """
    )


def test_many_threads_install_once(host):
    host.run(
        """
        import threading
        barrier = threading.Barrier(8)
        def work(number):
            p = patches()
            barrier.wait()
            p.arm()
            load("fakehost.alpha" if number % 2 else "fakehost.beta")
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import fakehost.alpha as alpha, fakehost.beta as beta
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        assert beta.Worker().execute(1) == ("hooked", 1)
        patches().remove()
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        assert vars(beta.Worker)["execute"] is beta.ORIGINALS["execute"]
        """
    )


def test_other_points_for_an_armed_host_are_refused(host):
    host.run(
        """
        first = patches(STEP)
        first.arm()
        text = refused(PatchTableError, patches(EXECUTE).arm)
        assert text == "FakeHost 1.2.3 is armed with other points already.", text
        first.remove()
        patches(EXECUTE).arm()
        assert load("fakehost.beta").Worker().execute(1) == ("hooked", 1)
        assert load("fakehost.alpha").Engine().step(1) == (1, 1)
        """
    )


def test_status_is_plain_data_and_tells_what_is_installed(host):
    host.run(
        """
        import json
        p = patches()
        p.arm()
        alpha = load("fakehost.alpha")
        assert p.status() == {
            "state": "armed", "refusal": None, "installed": ["scheduler.step"]
        }, p.status()
        beta = load("fakehost.beta")
        assert json.loads(json.dumps(p.status())) == {
            "state": "installed", "refusal": None, "installed": ["scheduler.step", "worker.execute"]
        }, p.status()
        assert p.installed() == {(alpha.Engine, "step"), (beta.Worker, "execute")}
        p.remove()
        assert p.installed() == set() and p.status()["installed"] == []
        """
    )


def test_forked_child_inherits_everything(host):
    host.run(
        """
        import os, threading, fakehost.alpha as alpha
        from kvoffload_patch.patching import patchset
        p = patches()
        p.arm()
        # A thread that holds the lock while the process forks must not leave it locked below.
        held, release = threading.Event(), threading.Event()
        def hold():
            with patchset._lock:
                held.set()
                release.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        threading.Timer(0.2, release.set).start()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert alpha.Engine().step(1) == ("hooked", (1, 1))
                assert load("fakehost.beta").Worker().execute(1) == ("hooked", 1)
                assert p.status()["state"] == "installed"
                patches().arm()
                p.remove()
                assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        thread.join()
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        assert p.status()["state"] == "armed"  # the child's import and removal are its own
        """
    )


def test_spawned_child_arms_again(host):
    host.write(
        "child.py",
        """
def bare(queue):
    import fakehost.alpha as alpha
    queue.put(alpha.Engine().step(1))
def armed(queue):
    from harness import patches
    patches().arm()
    bare(queue)
""",
    )
    host.run(
        """
        import multiprocessing
        if __name__ == "__main__":
            import child
            patches().arm()
            context = multiprocessing.get_context("spawn")
            for target, expected in ((child.bare, (1, 1)), (child.armed, ("hooked", (1, 1)))):
                queue = context.Queue()
                process = context.Process(target=target, args=(queue,))
                process.start()
                assert queue.get(timeout=30) == expected
                process.join()
                assert process.exitcode == 0
        """
    )


def test_removal_while_hooks_are_loaded_wins(host):
    # As another thread could do it: the hook's module is loaded without holding the lock.
    host.write("removing.py", "from harness import *\npatches().remove()\nfrom hooks import mark\n")
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        p = patches(dataclasses.replace(STEP, hook="removing:mark"))
        p.arm()
        assert p.status()["state"] == "removed" and not p.enabled()
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        p.arm()
        assert alpha.Engine().step(1) == ("hooked", (1, 1))
        """
    )


def test_point_without_hook_is_checked_but_not_wrapped(host):
    host.run(
        """
        import dataclasses, fakehost.alpha as alpha
        only_checked = dataclasses.replace(MAKE, hook="")
        p = patches(STEP, only_checked)
        p.arm()
        assert p.status()["state"] == "installed" and installed(p) == {"scheduler.step"}
        assert vars(alpha.Engine)["make"] is alpha.ORIGINALS["make"]
        wrong = dataclasses.replace(only_checked, returns=("int",))
        text = refused(SignatureMismatch, patches, STEP, wrong)
        assert "scheduler.make returns 'list[int]', expected 'int'" in text, text
        """
    )


def test_an_interrupt_while_it_arms_leaves_nothing_armed_and_it_can_be_armed_again(host):
    """As by a key, with the hooks of some modules registered; a notebook imports once more."""
    host.run(
        """
        import wrapt
        register, calls = wrapt.register_post_import_hook, []

        def interrupted(hook, name):
            calls.append(name)
            if len(calls) == 2:
                raise KeyboardInterrupt
            register(hook, name)

        wrapt.register_post_import_hook = interrupted
        p = patches()
        refused(KeyboardInterrupt, p.arm)
        assert not p.enabled() and p.status()["refusal"] is None
        import fakehost.alpha as alpha
        assert installed(p) == set() and vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        p = patches()
        p.arm()
        import fakehost.beta
        assert installed(p) == {"scheduler.step", "worker.execute"}
        assert p.status()["state"] == "installed"
        """
    )
