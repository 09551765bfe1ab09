"""Where the host is installed: its version and its sources, found without importing it."""

from __future__ import annotations

import pytest

from kvoffload_patch.patching import Host, HostNotFound, find_source, installed_version


def test_source_and_version_are_found_without_importing_the_host(host):
    host.write("fakehost/__init__.py", "raise RuntimeError('imported')")
    host.write("fakehost/deep/__init__.py", "raise RuntimeError('imported')")
    host.write("fakehost/deep/mod.py", "raise RuntimeError('imported')")
    host.run(
        """
        before = set(sys.modules)
        decision = decide(HOST, (STEP, EXECUTE), installed_version(HOST))
        assert decision.version == "1.2.3" and len(decision.points) == 2
        assert find_source("fakehost.deep").name == "__init__.py"
        assert find_source("fakehost.deep.mod").name == "mod.py"
        assert find_source("fakehost").parent.name == "fakehost"
        assert find_source("hooks").name == "hooks.py"
        for absent in ("fakehost.none", "no_such_package.mod"):
            refused(FileNotFoundError, find_source, absent)
        imported = {name.partition(".")[0] for name in sys.modules}
        assert not imported & {"fakehost", "hooks", "wrapt"}, imported
        """
    )


def test_first_installed_distribution_counts(host):
    host.write("x-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\n")  # without a version
    host.run(
        """
        import dataclasses
        several = dataclasses.replace(HOST, distributions=("absent", "x", "fakehost-cpu"))
        assert installed_version(several) == "1.2.3"
        none = dataclasses.replace(HOST, distributions=("absent", "x"))
        text = refused(HostNotFound, installed_version, none)
        assert text.startswith(f"FakeHost is not installed for {sys.executable} (looked for a")
        assert text.endswith("; install it there, or use the Python that has it."), text
        """
    )


@pytest.mark.parametrize("owner", ["stale", "fakehost-cpu", "neither"])
def test_of_several_releases_the_one_with_the_files_counts(host, owner):
    # What an uninstalled release leaves behind keeps its metadata, and lists no file of the host.
    stale = "Metadata-Version: 2.1\nName: stale\nVersion: 1.0.0\n"
    host.write("stale-0.dist-info/METADATA", stale)
    for name in ("stale", "fakehost-cpu"):
        folder = f"{name.replace('-', '_')}-0.dist-info"
        package = "fakehost/__init__.py,,\n" if name == owner else ""
        host.write(f"{folder}/RECORD", f"{folder}/METADATA,,\n{package}")
    expected = "1.2.3" if owner == "fakehost-cpu" else "1.0.0"
    host.run(
        f"""
        import dataclasses
        both = dataclasses.replace(HOST, distributions=("stale", "fakehost-cpu"))
        assert installed_version(both) == {expected!r}, installed_version(both)
        """
    )


def test_not_installed_in_this_process():
    with pytest.raises(HostNotFound):
        installed_version(Host("Toy", ("no-such-distribution",), "toy", ">=1.0", "use toy 1.3"))
    with pytest.raises(FileNotFoundError, match="no_such_package/core.py"):
        find_source("no_such_package.core")
