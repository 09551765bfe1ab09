"""Faults of what is checked before a function of vLLM's is wrapped, and of what is left then."""

from __future__ import annotations

from scripts.matrix.mutants_list import Mutant

PATCHING = (
    Mutant(
        "digests of function bodies are not compared",
        "patching/check.py",
        "if point.target in found and found[point.target] not in digests.get(point.target, ()):",
        "if False:",
        ("patching/test_check_verified.py",),
    ),
    Mutant(
        "a new parameter without a default is accepted",
        "patching/check.py",
        "(named if point.exact else required)",
        "(named if point.exact else ())",
        ("patching/test_check.py",),
    ),
    Mutant(
        "points stay installed when one cannot be",
        "patching/patchset.py",
        'self.take_off("failed")',
        'self.state = "failed"',
        ("patching/test_patchset.py",),
    ),
    Mutant(
        "what a tier uses is taken off when a later module cannot be patched",
        "patching/patchset.py",
        "if self.kept:",
        "if False:",
        ("patching/test_patchset_refused_imports.py",),
    ),
    Mutant(
        "an import ends of a refusal with KVOFFLOAD_STRICT off",
        "integration/install.py",
        "None if settings.strict else partial(_serve_without, patches, said)",
        "None",
        ("integration/test_install.py",),
    ),
    Mutant(
        "a function that others have replaced is accepted",
        "patching/live.py",
        "if type(target) is not FunctionType or not _is_at_home(target, homes):",
        "if False:",
        ("patching/test_patchset.py",),
    ),
    Mutant(
        "a function that a derived class overrides is accepted",
        "patching/objects.py",
        "if defined not in known[0].__mro__:",
        "if False:",
        ("patching/test_objects.py",),
    ),
)
