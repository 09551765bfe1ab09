"""Ships the start-up file `kvoffload_patch.pth` to the top of site-packages; all else is setup.cfg.

A wheel takes what `build_py` leaves in the build folder. An editable wheel does not, so its
folder gets the file as well; without that hook (it is not public) an editable install still works
through `python -m kvoffload_patch`.

A source archive has everything that the repository has, so that its tests and commands work in it.
"""

import os

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.command.sdist import sdist

STARTUP_FILE = "kvoffload_patch.pth"
FOLDERS = (".ci", "docs", "patches", "scripts", "tests")
FILES = (
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)


class BuildWithStartupFile(build_py):
    def run(self):
        super().run()
        self.mkpath(self.build_lib)
        self.copy_file(STARTUP_FILE, self.build_lib)

    def get_source_files(self):
        return [*super().get_source_files(), STARTUP_FILE]

    def get_outputs(self, include_bytecode=True):
        built = os.path.join(self.build_lib, STARTUP_FILE)
        return [*super().get_outputs(include_bytecode), built]


class EditableWithStartupFile(editable_wheel):
    def _run_build_commands(self, dist_name, unpacked_wheel, *folders):
        found = super()._run_build_commands(dist_name, unpacked_wheel, *folders)
        self.copy_file(STARTUP_FILE, str(unpacked_wheel))
        return found


class CompleteArchive(sdist):
    def make_distribution(self):
        for folder in FOLDERS:
            for path, below, names in os.walk(folder):
                below[:] = sorted(set(below) - {"__pycache__"})
                self.filelist.extend([os.path.join(path, name) for name in sorted(names)])
        self.filelist.extend([name for name in FILES if os.path.exists(name)])
        self.filelist.remove_duplicates()
        super().make_distribution()


setup(
    cmdclass={
        "build_py": BuildWithStartupFile,
        "editable_wheel": EditableWithStartupFile,
        "sdist": CompleteArchive,
    }
)
