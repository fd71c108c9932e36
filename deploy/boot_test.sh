#!/bin/bash
# Boots a real systemd with headrace's units in a container and hurts them: see deploy/README.md.
#
#   sudo deploy/boot_test.sh FOLDER [PYTHON_FOLDER]
#
# FOLDER         where the system is made, with 3 GB of room; kept, so a second run is quicker
# PYTHON_FOLDER  a Python installation to copy in and use, where Debian's own will not do
#
# Needs root, debootstrap, systemd-nspawn and package registries. TORCH, TORCH_INDEX and PIP_FIND_LINKS are
# handed to install.sh. Exits 0 when every check holds.
set -euo pipefail

source=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?the folder to make a system in}
python_folder=${2:-}
system=$folder/system

if [ ! -e "$system/usr/bin/systemctl" ]; then
  mkdir -p "$folder"
  debootstrap --variant=minbase \
    --include=systemd,systemd-sysv,dbus,python3,python3-venv,ca-certificates,procps \
    trixie "$system"
fi

if [ ! -e "$system/opt/headrace/current" ]; then
  cp -L /etc/resolv.conf "$system/etc/resolv.conf"
  cp -L /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/ca-certificates.crt"
  mkdir -p "$system/src"
  git -C "$source" archive HEAD | tar -xf - -C "$system/src"
  python=python3
  if [ -n "$python_folder" ]; then
    mkdir -p "$system/opt/python"
    cp -a "$python_folder/." "$system/opt/python"
    echo /opt/python/lib >"$system/etc/ld.so.conf.d/python.conf"
    chroot "$system" ldconfig
    python=/opt/python/bin/python3
  fi
  links=${PIP_FIND_LINKS:-}
  if [ -n "$links" ]; then
    mkdir -p "$system$links"
    cp "$links"/* "$system$links"
  fi
  mount --bind /proc "$system/proc"
  trap 'umount "$system/proc"' EXIT
  chroot "$system" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHON="$python" \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt TORCH="${TORCH:-torch}" \
    ${TORCH_INDEX:+TORCH_INDEX="$TORCH_INDEX"} ${links:+PIP_FIND_LINKS="$links"} \
    /src/deploy/install.sh
  umount "$system/proc"
  trap - EXIT
  cp -a "$system/opt/headrace/current/." "$system/opt/headrace/second"
fi

cat >"$system/checks.sh" <<'CHECKS'
set -u
python=/opt/headrace/current/bin/python
failures=0
check() { # WORDS FOUND WANTED
  if [ "$2" = "$3" ]; then echo "ok      $1"; else
    echo "FAILED  $1: found '$2', wanted '$3'"
    failures=$((failures + 1))
  fi
}
ask() { # "misses" of a completion, once there is one
  for _ in $(seq 60); do
    $python - 2>/dev/null <<'ASK' && return
import json
import urllib.request
body = {"model": "demo", "prompt": "KING HENRY.", "max_tokens": 12, "temperature": 0}
asked = urllib.request.Request("http://127.0.0.1:8080/v1/completions", json.dumps(body).encode(),
                               {"content-type": "application/json"})
answer = json.loads(urllib.request.urlopen(asked, timeout=60).read())
assert answer["choices"][0]["text"]
print(answer["usage"]["headrace"]["misses"])
ASK
    sleep 1
  done
}
of() { systemctl show --property "$2" --value "headrace-$1"; }
watch() { # SECONDS
  for s in expertd compute frontend; do
    mkdir -p "/run/systemd/system/headrace-$s.service.d"
    printf '[Service]\nWatchdogSec=%s\n' "$1" >"/run/systemd/system/headrace-$s.service.d/99.conf"
  done
  systemctl daemon-reload
  systemctl restart headrace.target
}
everything="headrace.target headrace-expertd headrace-compute headrace-frontend"

echo "# $(systemctl --version | head -1)"
systemctl enable --quiet --now headrace.target
check "a cold start reads experts" "$([ "$(ask)" -gt 0 ] && echo yes)" yes
check "runtime directory" "$(stat -c '%a %U' /run/headrace)" "700 headrace"
check "sockets" "$(stat -c %a /run/headrace/*.sock | sort -u)" 600
check "settings" "$(stat -c '%a %U %G' /etc/headrace/headrace.toml)" "640 root headrace"
check "one descriptor is stored" "$(of expertd NFileDescriptorStore)" 1
compute=$(of compute MainPID)
kill -9 "$(of expertd MainPID)"
sleep 3
check "after kill -9 no expert is read again" "$(ask)" 0
check "compute stayed" "$(of compute MainPID)" "$compute"
check "the successor says so" "$(of expertd StatusText)" "serving, generation 2"
systemctl restart headrace-expertd
check "after a restart no expert is read again" "$(ask)" 0
check "compute stayed" "$(of compute MainPID)" "$compute"
# shellcheck disable=SC2086
systemctl stop $everything
check "stopped" "$(systemctl is-active headrace-expertd headrace-compute headrace-frontend | sort -u)" inactive
check "the store keeps the arena" "$(of expertd NFileDescriptorStore)" 1
systemctl start headrace.target
check "after stop and start no expert is read again" "$(ask)" 0
/src/deploy/install.sh --use second 2>/dev/null
systemctl restart headrace.target
check "after an upgrade no expert is read again" "$(ask)" 0
check "the other release runs" "$(readlink /opt/headrace/current)" second
/src/deploy/install.sh --use "$(ls /opt/headrace | grep -v -e second -e current | head -1)" 2>/dev/null
systemctl restart headrace.target
check "after a rollback no expert is read again" "$(ask)" 0
watch 4s
ask >/dev/null
sleep 8
for s in expertd compute frontend; do check "$s shows life" "$(of $s NRestarts)" 0; done
for s in expertd compute frontend; do kill -STOP "$(of $s MainPID)"; done
sleep 12
for s in expertd compute frontend; do
  check "$s, stopped in its tracks, is restarted" "$([ "$(of $s NRestarts)" -ge 1 ] && echo yes)" yes
done
check "and all goes on" "$([ -n "$(ask)" ] && echo yes)" yes
# shellcheck disable=SC2086
systemctl stop $everything
systemctl clean --what=fdstore headrace-expertd
check "the arena is given back" "$(of expertd NFileDescriptorStore)" 0
check "systemd-analyze verify" "$(systemd-analyze verify /etc/systemd/system/headrace*.service 2>&1)" ""
for s in expertd compute frontend; do systemd-analyze security "headrace-$s" | tail -1; done
systemctl disable --quiet headrace.target
journalctl --no-pager -o cat -u 'headrace-*' >/journal.log
echo "failures: $failures"
CHECKS

cat >"$system/etc/systemd/system/checks.service" <<'UNIT'
[Service]
Type=oneshot
ExecStart=/bin/bash /checks.sh
ExecStopPost=/bin/systemctl poweroff --force
StandardOutput=file:/checks.log
StandardError=file:/checks.log
[Install]
WantedBy=multi-user.target
UNIT
mkdir -p "$system/etc/systemd/system/multi-user.target.wants"
ln -sf ../checks.service "$system/etc/systemd/system/multi-user.target.wants/checks.service"
rm -f "$system/checks.log"
SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 timeout 400 systemd-nspawn --directory "$system" --boot \
  --register=no --keep-unit --private-network --link-journal=no </dev/null >"$folder/boot.log" 2>&1 || true
cat "$system/checks.log"
grep -qx 'failures: 0' "$system/checks.log"
