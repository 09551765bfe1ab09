"""An import that cannot be patched and goes on: everything is taken off, said once, for good."""

from __future__ import annotations

import pytest

# Another package replaces a function of a module before our hook for it runs.
OTHERS = """
        import wrapt
        def replaced_by_others(name, cls, attribute, by=lambda self, *args: "theirs"):
            replace = lambda module: setattr(getattr(module, cls), attribute, by)
            wrapt.register_post_import_hook(replace, name)
        said = []
        def is_plain(module, cls="Engine"):
            owner = getattr(module, cls)
            return all(vars(owner).get(k) is v for k, v in module.ORIGINALS.items())
"""


@pytest.mark.parametrize("first", ["alpha", "beta"])
def test_every_point_is_taken_off_and_the_import_goes_on(host, first):
    host.run(
        OTHERS
        + f"""
        modules = {{"alpha": "Engine", "beta": "Worker"}}
        second = ({{*modules}} - {{{first!r}}}).pop()
        attribute = {{"Engine": "step", "Worker": "execute"}}[modules[second]]
        replaced_by_others("fakehost." + second, modules[second], attribute)
        p = patches()
        p.arm(lambda refusal: said.append((refusal, installed(p), is_plain(done, owner))))
        done, owner = load("fakehost.{first}"), modules[{first!r}]
        assert len(installed(p)) == 1 and not is_plain(done, owner)
        module = load("fakehost." + second)
        assert is_plain(done, owner) and sys.modules["fakehost." + second] is module
        assert getattr(getattr(module, modules[second])(), attribute)(1) == "theirs"
        ((refusal, nothing, plain),) = said
        assert type(refusal) is SignatureMismatch and "(it is now " in str(refusal), refusal
        assert nothing == set() and plain, "it was said before it was so"
        status = p.status()
        assert (status["state"], status["refusal"]) == ("failed", str(refusal))
        assert p.keep() == str(refusal) and not p.enabled()
        assert refused(SignatureMismatch, p.arm) == str(refusal)
        """
    )


@pytest.mark.parametrize("again", ["importlib.reload(alpha)", "sys.modules.pop('fakehost.alpha')"])
def test_later_imports_and_repeated_ones_are_left_alone(host, again):
    host.run(
        OTHERS
        + f"""
        import dataclasses, importlib
        p = patches(dataclasses.replace(STEP, hook="hooks:missing"), EXECUTE)
        p.arm(said.append)
        alpha = load("fakehost.alpha")
        assert is_plain(alpha)
        {again}
        assert is_plain(load("fakehost.alpha")) and is_plain(load("fakehost.beta"), "Worker")
        assert len(set(map(str, said))) == 1 and installed(p) == set()
        """
    )


@pytest.mark.parametrize(
    "armed",
    ["STEP, dataclasses.replace(EXECUTE, hook='hooks:missing'), LATE", "LATE, FAILING, EXECUTE"],
)
def test_what_fails_while_arming_is_raised_and_no_later_import_fails(host, armed):
    host.write("fakehost/gamma.py", "class Late:\n    def run(self): return 1\n")
    host.run(
        OTHERS
        + f"""
        import dataclasses, fakehost.alpha as alpha, fakehost.beta as beta
        LATE = point("late.run", "fakehost.gamma:Late.run", "self")
        FAILING = dataclasses.replace(STEP, hook="hooks:missing")
        p = patches({armed})
        text = refused(InstallFailed, p.arm, said.append)
        assert is_plain(alpha) and is_plain(beta, "Worker")
        assert load("fakehost.gamma").Late().run() == 1
        assert len(said) < 2 and set(map(str, said)) <= set([text]), (text, said)
        assert p.status()["refusal"] == text, (text, p.status())
        """
    )


ANY_KIND = {
    "hook without a module": ("", "no_such_module:hook"),
    "module that raises": ("", "raising:hook"),
    "error that cannot be printed": ("", "unprintable:hook"),
    "assignment": ("def __setattr__(cls, *_): raise TypeError('final')", "hooks:mark"),
    "signature": ("", "static"),
}


@pytest.mark.parametrize(("meta", "hook"), ANY_KIND.values(), ids=list(ANY_KIND))
def test_whatever_fails_the_import_goes_on(host, meta, hook):
    host.write("raising.py", "raise MemoryError('no more')\n")
    host.write(
        "unprintable.py",
        "class Broken(Exception):\n    def __str__(self): raise ValueError('no text')\n"
        "raise Broken\n",
    )
    host.replace(
        "fakehost/alpha.py", "class Base:", f"class Meta(type):\n    {meta or 'pass'}\nclass Base:"
    )
    host.replace("fakehost/alpha.py", "class Engine(Base):", "class Engine(Base, metaclass=Meta):")
    host.run(
        OTHERS
        + f"""
        import dataclasses
        if {hook!r} == "static":
            replaced_by_others("fakehost.alpha", "Engine", "make", staticmethod(len))
        else:
            MAKE = dataclasses.replace(MAKE, hook={hook!r})
        p = patches(EXECUTE, STEP, MAKE)
        p.arm(said.append)
        beta, alpha = load("fakehost.beta"), load("fakehost.alpha")
        assert alpha.Engine().step(1) == (1, 1) and is_plain(beta, "Worker")
        assert len(said) == 1 and "FakeHost 1.2.3 " in str(said[0]), said
        """
    )


def test_what_cannot_be_put_back_calls_on_and_hinders_nothing_else(host):
    host.replace("fakehost/beta.py", "class Worker:", "class Worker(metaclass=Meta):")
    host.replace(
        "fakehost/beta.py",
        "\nclass Worker",
        "class Meta(type):\n"
        "    def __setattr__(cls, name, value):\n"
        "        if getattr(value, '__wrapped__', None) is None: raise TypeError('final')\n"
        "        super().__setattr__(name, value)\n"
        "class Worker",
    )
    host.write("fakehost/gamma.py", "class Late:\n    def run(self): return 1\n")
    host.run(
        OTHERS
        + """
        replaced_by_others("fakehost.gamma", "Late", "run")
        p = patches(STEP, EXECUTE, point("late.run", "fakehost.gamma:Late.run", "self"))
        p.arm(said.append)
        alpha, beta = load("fakehost.alpha"), load("fakehost.beta")
        assert beta.Worker().execute(1) == ("hooked", 1)
        load("fakehost.gamma")
        assert is_plain(alpha) and beta.Worker().execute(1) == 1 and len(said) == 1
        """
    )


def test_an_interrupt_ends_the_import_and_the_next_one_is_plain(host):
    host.write("interrupted.py", "raise KeyboardInterrupt\n")
    host.run(
        OTHERS
        + """
        import dataclasses, fakehost.beta as beta
        p = patches(dataclasses.replace(STEP, hook="interrupted:hook"), EXECUTE)
        p.arm(said.append)
        refused(KeyboardInterrupt, load, "fakehost.alpha")
        assert is_plain(beta, "Worker") and len(said) == 1
        assert is_plain(load("fakehost.alpha"))
        """
    )


def test_many_threads_go_on(host):
    host.run(
        OTHERS
        + """
        import threading
        for name, cls, attribute in (("alpha", "Engine", "step"), ("beta", "Worker", "execute")):
            replaced_by_others("fakehost." + name, cls, attribute)
        p, failed, barrier = patches(), [], threading.Barrier(8)
        p.arm(said.append)
        def work(number):
            barrier.wait()
            try:
                load("fakehost.alpha" if number % 2 else "fakehost.beta")
            except BaseException as error:
                failed.append(error)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert failed == [] and len(said) in (1, 2) and installed(p) == set()
        assert len({str(refusal) for refusal in said}) == 1, "the first one counts"
        """
    )


def test_an_import_in_another_thread_goes_on_while_this_one_arms(host):
    host.write(
        "elsewhere.py",
        "import threading\nfrom harness import *\n"
        "failed = []\n"
        "def work():\n"
        "    try: load('fakehost.beta')\n"
        "    except BaseException as error: failed.append(error)\n"
        "thread = threading.Thread(target=work)\nthread.start()\nthread.join()\n"
        "from hooks import mark\n",
    )
    host.run(
        OTHERS
        + """
        import dataclasses, fakehost.alpha as alpha, hooks
        replaced_by_others("fakehost.beta", "Worker", "execute")
        p = patches(EXECUTE, dataclasses.replace(STEP, hook="elsewhere:mark"))
        p.arm(said.append)
        import elsewhere
        assert elsewhere.failed == [] and len(said) == 1, (elsewhere.failed, said)
        assert is_plain(alpha) and p.status()["refusal"] == str(said[0]) and not installed(p)
        """
    )


def test_what_is_in_use_stays_and_nothing_of_the_refused_module_does(host):
    """A worker that carries out plans must not lose its hook: the engine counts on it."""
    host.run(
        OTHERS
        + """
        replaced_by_others("fakehost.alpha", "Engine", "make")
        p = patches(STEP, MAKE, EXECUTE)
        p.arm(said.append)
        beta = load("fakehost.beta")
        assert p.keep() == ""
        alpha = load("fakehost.alpha")
        assert beta.Worker().execute(1) == ("hooked", 1)
        assert vars(alpha.Engine)["step"] is alpha.ORIGINALS["step"]
        assert installed(p) == {"worker.execute"} and not p.enabled()
        (refusal,) = said
        assert "What is in use already stays patched; use 1.x." in str(refusal), refusal
        assert p.keep() == str(refusal), "others must not begin to use it"
        p.remove()
        assert is_plain(beta, "Worker")
        alpha.Engine.make = alpha.ORIGINALS["make"]
        p.arm(said.append)
        assert len(installed(p)) == 3 and p.keep() == ""
        """
    )


def test_one_that_goes_with_a_refused_host_gives_up(host):
    host.run(
        OTHERS
        + """
        p = patches()
        p.arm(said.append)
        alpha = load("fakehost.alpha")
        p.give_up(InstallFailed("the other was refused"))
        assert is_plain(alpha) and said == []
        assert is_plain(load("fakehost.beta"), "Worker")
        assert p.keep() == p.status()["refusal"] == str(said[0]) == "the other was refused"
        """
    )


def test_a_class_that_a_reload_has_made_is_not_the_one_that_was_patched(host):
    host.run(
        """
        import importlib
        p = patches()
        p.arm()
        alpha = load("fakehost.alpha")
        before = alpha.Engine
        assert p.installed() == {(before, "step")}
        importlib.reload(alpha)
        assert alpha.Engine().step(1) == (1, 1) and alpha.Engine is not before
        assert p.installed() == {(before, "step")}
        """
    )
