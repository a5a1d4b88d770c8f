#!/bin/sh
# Installs what building needs and is missing: a C++ compiler, Python's venv and headers, and libibverbs' headers; and libraries and
# commands, of which each is named with its package. Usage: debian-packages.sh PYTHON [NAME=PACKAGE ...]
set -eu
python=$1
shift
PATH=$PATH:/usr/sbin:/sbin  # where Debian has ldconfig and tc
need=""
command -v g++ >/dev/null 2>&1 || need="$need g++"
"$python" -c 'import ensurepip, venv' 2>/dev/null || need="$need python3-venv"
"$python" -c 'import os, sysconfig; assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || need="$need python3-dev"
[ -e /usr/include/infiniband/verbs.h ] || need="$need libibverbs-dev"
for thing in "$@"; do
  case $thing in
    *.so.*=*) ldconfig -p | grep -q "${thing%%=*} " ;;
    *) command -v "${thing%%=*}" >/dev/null 2>&1 ;;
  esac || need="$need ${thing#*=}"
done
[ -z "$need" ] && exit 0
if ! command -v apt-get >/dev/null 2>&1; then
  echo "missing:$need (not a Debian system: install their equivalents)" >&2
  exit 1
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo=sudo
$sudo apt-get update -qq
# shellcheck disable=SC2086 # a list of packages
DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq $need
