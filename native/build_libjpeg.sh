#!/bin/sh
# Builds libjpeg-turbo as a static library, for wheels: build_libjpeg.sh PREFIX
set -eu

prefix="$1"
version=3.1.2
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
url="https://github.com/libjpeg-turbo/libjpeg-turbo/releases/download"
curl -fsSL "$url/$version/libjpeg-turbo-$version.tar.gz" | tar -xz -C "$folder" --strip-components=1
cmake -S "$folder" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR=lib -DENABLE_SHARED=OFF -DWITH_TURBOJPEG=OFF \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON
cmake --build "$folder/build" --parallel
cmake --install "$folder/build"
