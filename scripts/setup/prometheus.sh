# Sourced by scripts/test behind env.sh: Prometheus in $VENV/bin, for the tests of docs/grafana.json.
#
# On Debian and its kin it is taken out of the distribution's package, which is not installed: that
# needs no root and changes nothing outside $VENV. Elsewhere, and without a network, the tests that
# need it are skipped. It is tried once for each environment.

get_prometheus() {
    local folder tried=$VENV/.prometheus-tried
    if [[ -e $tried ]] || command -v prometheus >/dev/null; then
        return
    fi
    touch "$tried"
    folder=$(mktemp -d)
    if (
        cd "$folder" &&
            apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 download prometheus &&
            dpkg-deb -x prometheus_*.deb . && install -m 755 usr/bin/prometheus "$VENV/bin/"
    ) >/dev/null 2>&1; then
        echo "Prometheus: from the distribution's package, in $VENV/bin"
    else
        echo "Prometheus: not on the PATH, and no package could be fetched; its tests are skipped"
    fi
    rm -rf "$folder"
}

get_prometheus
