"""Every order of importing, arming and removing ends in the state that a small model predicts."""

from __future__ import annotations

import pytest

# `play` compares the process with the model after every step, not only at the end.
PLAY = """
STEPS = ("alpha", "beta", "arm", "remove")

def play(steps):
    first, second = patches(), patches()
    armed, ever, turn = False, False, 0
    for step in steps:
        if step == "arm":
            turn += 1
            (first, second)[turn % 2].arm()  # alternating: two patch sets are the same as one
            armed = ever = True
        elif step == "remove":
            (second, first)[turn % 2].remove()
            armed = False
        else:
            load("fakehost." + step)
        check(steps, first, armed, ever)
        check(steps, second, armed, ever)

def check(steps, patch_set, armed, ever):
    expected = set()
    for name, attribute, owner, point in (
        ("fakehost.alpha", "step", "Engine", "scheduler.step"),
        ("fakehost.beta", "execute", "Worker", "worker.execute"),
    ):
        module = sys.modules.get(name)
        if module is None:
            continue
        cls = getattr(module, owner)
        plain = (7, 1) if attribute == "step" else 7
        result = getattr(cls(), attribute)(7)
        if armed:
            expected.add(point)
            assert result == ("hooked", plain), (steps, result)
        else:
            assert result == plain, (steps, result)
            assert vars(cls)[attribute] is module.ORIGINALS[attribute], steps
    if armed:
        state = "installed" if len(expected) == 2 else "armed"
    else:
        state = "removed" if ever else "idle"
    assert patch_set.status()["state"] == state, (steps, patch_set.status())
    assert patch_set.enabled() is armed, steps
    assert installed(patch_set) == expected, steps
"""

NAMED = (
    "alpha_arm",
    "arm_alpha",
    "alpha_beta_arm",
    "arm_alpha_beta",
    "arm_arm_alpha",
    "alpha_arm_arm",
    "arm_alpha_arm_beta",
    "alpha_arm_beta",
    "alpha_arm_remove",
    "arm_remove_alpha",
    "arm_alpha_remove_beta",
    "arm_alpha_beta_remove_arm",
    "arm_remove_arm_alpha_beta",
    "alpha_arm_remove_arm_remove_beta_arm",
    "remove_arm_alpha",
    "arm_alpha_remove_remove_arm_beta",
)


@pytest.mark.parametrize("order", NAMED)
def test_order_in_a_fresh_process(host, order):
    host.run(PLAY + f"play({order.split('_')!r})")


def test_every_order_of_up_to_four_steps(host):
    output = host.run(
        PLAY
        + """
import itertools, os, wrapt
orders = [o for n in range(1, 5) for o in itertools.product(STEPS, repeat=n)]
for order in orders:
    child = os.fork()
    if child == 0:
        try:
            play(order)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, order
print(len(orders))
"""
    )
    assert output.strip() == str(4 + 4**2 + 4**3 + 4**4)
