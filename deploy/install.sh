#!/bin/sh
# Installs headrace from this source tree as services, beside what is installed already.
#
#   deploy/install.sh                    a new release below /opt/headrace, made the current one
#   deploy/install.sh --use RELEASE      another installed release becomes the current one
#   deploy/install.sh --files            units, sysusers, tmpfiles and settings alone
#
# Variables: PYTHON (python3), TORCH (what pip is asked for as torch), TORCH_INDEX (a package index
# to take torch from), DESTDIR (a folder to install --files into).
#
# Needs root, and the network for pip. Starts and stops nothing.
set -eu

source=$(cd "$(dirname "$0")/.." && pwd)
releases=/opt/headrace
python=${PYTHON:-python3}
dest=${DESTDIR:-}

say() { printf 'install: %s\n' "$*" >&2; }
fail() {
  say "$*"
  exit 1
}

systemd_version() {
  systemctl --version 2>/dev/null | awk 'NR == 1 { print $2 + 0 }'
}

# The link changes in one step, so a service that starts meanwhile finds the one or the other.
use() {
  [ -x "$releases/$1/bin/python" ] || fail "$releases/$1: no release; there are: $(ls "$releases")"
  ln -sfn "$1" "$releases/.current"
  mv -T "$releases/.current" "$releases/current"
  say "current release: $1"
}

install_files() {
  umask 022
  units=$dest/etc/systemd/system
  mkdir -p "$units" "$dest/etc/sysusers.d" "$dest/etc/tmpfiles.d" "$dest/etc/headrace"
  install -m 0644 "$source"/deploy/systemd/*.service "$source"/deploy/systemd/*.target "$units"
  version=${SYSTEMD_VERSION:-$(systemd_version)}
  for drop_in in "$source"/deploy/systemd-254/*.service.d; do
    folder=$units/$(basename "$drop_in")
    if [ "${version:-0}" -ge 254 ]; then
      mkdir -p "$folder"
      install -m 0644 "$drop_in/254.conf" "$folder/254.conf"
    else
      rm -f "$folder/254.conf"
    fi
  done
  install -m 0644 "$source/deploy/systemd/sysusers.d.conf" "$dest/etc/sysusers.d/headrace.conf"
  install -m 0644 "$source/deploy/systemd/tmpfiles.d.conf" "$dest/etc/tmpfiles.d/headrace.conf"
  if [ -e "$dest/etc/headrace/headrace.toml" ]; then
    say "$dest/etc/headrace/headrace.toml is kept as it is"
  else
    install -m 0640 "$source/deploy/headrace.toml" "$dest/etc/headrace/headrace.toml"
  fi
  if [ -z "$dest" ]; then
    systemd-sysusers headrace.conf
    systemd-tmpfiles --create headrace.conf
    if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
  fi
}

install_release() {
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python: Python 3.11 or newer is needed (PYTHON=python3.11)"
  "$python" -c 'import ensurepip, venv' ||
    fail "$python cannot make virtual environments: apt-get install python3-venv"
  version=$("$python" "$source/headrace.py" --version | cut -d ' ' -f 2)
  release=$version
  number=1
  while [ -e "$releases/$release" ]; do
    number=$((number + 1))
    release=$version-$number
  done
  torch=${TORCH:-torch}
  umask 022
  mkdir -p "$releases"
  copy=$(mktemp -d) # pip leaves files of root's in the tree that it builds
  tar -C "$source" --exclude=./.git --exclude=./.venv --exclude=./tests -cf - . | tar -C "$copy" -xf -
  say "release $release with $torch; this takes some minutes"
  "$python" -m venv "$releases/$release"
  pip="$releases/$release/bin/python -m pip --quiet --disable-pip-version-check --no-cache-dir"
  if ! { $pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" &&
    $pip install "${copy}[serve,metrics]"; }; then
    rm -rf "${releases:?}/$release" "$copy"
    fail "pip failed: nothing has changed"
  fi
  rm -rf "$copy"
  mkdir -p "$releases/$release/share/headrace"
  install -m 0644 "$source/deploy/README.md" "$releases/$release/share/headrace"
  use "$release"
  ln -sfn "$releases/current/bin/headrace" /usr/local/bin/headrace
}

case ${1:-} in
  '')
    [ "$(id -u)" = 0 ] || fail "must be run as root"
    install_release
    install_files
    say "settings: /etc/headrace/headrace.toml; start: systemctl enable --now headrace.target"
    ;;
  --files)
    [ $# = 1 ] || fail "--files takes nothing"
    install_files
    ;;
  --use)
    [ $# = 2 ] || fail "--use RELEASE"
    use "$2"
    ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    [ "$1" = --help ] || exit 2
    ;;
esac
