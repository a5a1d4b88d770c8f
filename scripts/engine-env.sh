#!/bin/sh
# An inference engine for CPUs in an environment of its own, with this project in it as the test environment has it.
#
#   engine-env.sh NAME TEST_ENVIRONMENT FOLDER
#
# The engine itself (gigabytes) is installed once a machine, under ${XDG_CACHE_HOME:-~/.cache}/mooncake_ray, by what its requirements say; FOLDER
# gets a small environment over it.
set -eu
name=$1 tests=$2 folder=$3
requirements=$(dirname "$0")/engines/$name.txt
python=$tests/bin/python
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
digest=$(sha256sum "$requirements" "$0" | sha256sum | cut -c1-12)
base=${XDG_CACHE_HOME:-$HOME/.cache}/mooncake_ray/$name-$version-$digest

if [ ! -e "$base/.ready" ]; then
  echo "Installing $name into $base (minutes, gigabytes)" >&2
  mkdir -p "$(dirname "$base")"
  exec 9>"$base.lock"
  flock 9 # somebody else may do just this
  if [ ! -e "$base/.ready" ]; then
    rm -rf "$base"
    "$python" -m venv "$base"
    pip="$base/bin/python -m pip --disable-pip-version-check"
    case $name in
    vllm)
      $pip install -q torch==2.13.0 # first: others' ranges would take one for CUDA
      $pip install -q -r "$requirements"
      $pip uninstall -q -y torchvision torchaudio torchcodec
      ;;
    sglang)
      $pip install -q torch==2.13.0
      $pip install -q --no-deps -r "$requirements"
      $pip install -q ray==2.60.0
      ;;
    esac
    touch "$base/.ready"
  fi
fi

rm -rf "$folder"
"$python" -m venv --without-pip "$folder"
site=$folder/lib/python$version/site-packages
echo "$base/lib/python$version/site-packages" >"$site/engine.pth"
# The project as the tests have it: its modules where they are, and what was compiled.
built=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for part in "$built"/mooncake_ray "$built"/mooncake_ray-*.dist-info "$built"/_editable_skbc_mooncake_ray.*; do
  ln -s "$part" "$site/"
done
touch "$folder/.ready"
