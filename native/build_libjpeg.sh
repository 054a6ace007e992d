#!/bin/sh
# Builds libjpeg-turbo as a static library, for wheels: build_libjpeg.sh PREFIX [ARGUMENT OF CMAKE...]
#
# LIBJPEG_SOURCE names a folder with its source; otherwise it is downloaded.
set -eu

prefix="$1"
shift
version=3.1.2
checksum=8f0012234b464ce50890c490f18194f913a7b1f4e6a03d6644179fa0f867d0cf
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
source="${LIBJPEG_SOURCE:-}"
if [ -z "$source" ]; then
    source="$folder/source"
    archive="$folder/libjpeg-turbo.tar.gz"
    url="https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download"
    curl -fsSL -o "$archive" "$url/$version/libjpeg-turbo-$version.tar.gz"
    if command -v sha256sum >/dev/null; then sum=sha256sum; else sum="shasum -a 256"; fi
    echo "$checksum  $archive" | $sum -c -
    mkdir "$source"
    tar -xzf "$archive" -C "$source" --strip-components=1
fi
cmake -S "$source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR=lib -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF -DREQUIRE_SIMD=ON \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON "$@"
cmake --build "$folder/build" --parallel 2
cmake --install "$folder/build"
mkdir -p "$prefix/licenses"
cp "$source/LICENSE.md" "$source/README.ijg" "$prefix/licenses"
