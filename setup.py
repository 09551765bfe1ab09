"""Ships the start-up file `kvoffload_patch.pth` to the top of site-packages; all else is setup.cfg.

A wheel takes what `build_py` leaves in the build folder. An editable wheel does not, so its
folder gets the file as well; without that hook (it is not public) an editable install still works
through `python -m kvoffload_patch`.
"""

import os

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

STARTUP_FILE = "kvoffload_patch.pth"


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


setup(cmdclass={"build_py": BuildWithStartupFile, "editable_wheel": EditableWithStartupFile})
