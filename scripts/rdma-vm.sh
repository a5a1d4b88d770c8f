#!/bin/bash
# Runs a command on a machine with an RDMA device: an emulated guest whose kernel has soft-RoCE. Needs Debian, and no hardware.
#
#   rdma-vm.sh [-m MIB] [-c CPUS] [-t SECONDS] [-w SOCKET,NUMBER] COMMAND [ARGUMENT...]
#
#   -m  memory of the guest, 4096          -c  processors, 2           -t  time limit, 300
#   -w  a wire to a second guest: both name one unix socket; NUMBER is 1 in one of them and 2 in the other
#
# The guest sees this machine's files, and what it writes is gone afterwards, but for the current directory, which it shares. COMMAND
# runs there as root, with this environment; what it prints comes out here, and its exit status is this script's (124: the time is up,
# 125: the guest itself failed; its console comes before either). How long all took is said at the end. The guest has the device rxe0 at
# 198.18.0.1 for both ends of a connection; with -w also rxe1 at 198.18.1.NUMBER, on eth0. There is no way out of it.
#
# What is missing is installed: QEMU, what makes a boot image, and what the guest uses for RDMA. Kernel and boot image are kept in
# ~/.cache/mooncake-ray-vm. All of that has ten minutes.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # depmod and others, which are for administrators

die() {
  echo "rdma-vm: $2" >&2
  exit "$1"
}

memory=4096 cpus=2 limit=300 wire=
setup_limit=600 begin=$SECONDS
while getopts m:c:t:w: option; do
  case $option in
    m) memory=$OPTARG ;;
    c) cpus=$OPTARG ;;
    t) limit=$OPTARG ;;
    w) wire=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || die 2 "no command (see the head of this file)"

cache=${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mooncake-ray-vm}
drivers=(virtio_pci virtio_console 9pnet_virtio 9p overlay dummy virtio_net crc32_generic sch_netem rdma_rxe rdma_ucm)
image=$cache/boot-$(cksum <"$0" | cut -d' ' -f1) # made from what stands in this file

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# Waits for mirrors, and for another one at work, but not for ever.
apt() {
  local code=0
  as_root timeout -k 5 "$setup_limit" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o "DPkg::Lock::Timeout=$setup_limit" "$@" || code=$?
  [ "$code" -ne 124 ] || die 125 "not done after $setup_limit s: apt-get $*"
  return "$code"
}

packages() {
  local wanted=(qemu-system-x86 busybox-static cpio kmod iproute2 python3-minimal rdma-core ibverbs-providers
    python3-pyverbs) name missing=()
  for name in "${wanted[@]}"; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "rdma-vm: installs ${missing[*]}" >&2
  apt update
  apt install -y --no-install-recommends "${missing[@]}" >/dev/null
}

# Debian's own kernel, taken out of its package: the plain image, which boots sooner than the compressed one, and the drivers.
kernel() {
  local work package version driver path
  work=$(mktemp -d "$cache/kernel.XXXXXX")
  apt update
  package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" { print $2; exit }')
  [ -n "$package" ] || die 125 "apt knows no kernel (linux-image-amd64)"
  echo "rdma-vm: gets $package" >&2
  version=${package#linux-image-}
  (cd "$work" && apt download -o APT::Sandbox::User=root "$package" && dpkg-deb -x ./*.deb .)
  depmod -b "$work" "$version"
  mkdir "$work/drivers"
  for driver in "${drivers[@]}"; do
    modprobe -d "$work" -S "$version" --show-depends "$driver"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r path; do
    cp "$path" "$work/drivers/"
    echo "${path##*/}" >>"$work/drivers/order"
  done
  python3 -c '
import lzma, sys
image = open(sys.argv[1], "rb").read()
packed = image[image.index(b"\xfd7zXZ\0"):]
open(sys.argv[2], "wb").write(lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed))' "$work/boot/vmlinuz-$version" "$work/vmlinux"
  rm -rf "$cache/drivers-of-$drivers_id"
  mv "$work/drivers" "$cache/drivers-of-$drivers_id"
  mv "$work/vmlinux" "$cache/vmlinux-$drivers_id"
  rm -r "$work"
}

# The first program of the guest: puts a throw-away layer over this machine's root, and goes there.
boot_image() {
  local work
  work=$(mktemp -d "$cache/image.XXXXXX")
  mkdir "$work/bin"
  cp "$(command -v busybox)" "$work/bin/"
  cp -r "$cache/drivers-of-$drivers_id" "$work/drivers"
  cat >"$work/init" <<'EOF'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /host /layer /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r driver; do insmod "/drivers/$driver"; done </drivers/order
mkdir /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /host
mount -t tmpfs tmpfs /layer
mkdir /layer/new /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/new,workdir=/layer/work root /root
mount -t tmpfs tmpfs /root/run
for tree in proc sys dev; do mount --move "/$tree" "/root/$tree"; done
exec switch_root /root /bin/bash "$job/guest"
EOF
  chmod +x "$work/init"
  (cd "$work" && find . | cpio -o -H newc --quiet) >"$work.cpio"
  rm -r "$work"
  mv "$work.cpio" "$image"
}

# What the guest does. Its output leaves by one port and the status of the command by another.
guest_program() {
  printf 'here=%q job=%q number=%q\n' "$PWD" "$job" "${wire##*,}"
  cat <<'EOF'
ports=(/dev/vport*)
exec >"${ports[0]}" 2>&1 </dev/null
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose here "$here"
busybox hostname localhost
ulimit -l unlimited
ip link set lo up
device() { # NAME INTERFACE MTU ADDRESS
  ip link set "$2" mtu "$3"
  ip address add "$4/24" dev "$2"
  ip link set "$2" up
  rdma link add "$1" type rxe netdev "$2"
}
ip link add roce0 type dummy
device rxe0 roce0 9000 198.18.0.1
[ -z "$number" ] || device rxe1 eth0 4200 "198.18.1.$number"
read -r up _ </proc/uptime
/bin/bash "$job/command"
code=$?
read -r over _ </proc/uptime
echo "$code" "${up%.*}" "$((${over%.*} - ${up%.*}))" >"${ports[1]}"
sync
busybox poweroff -f
EOF
}

mkdir -p "$cache"
drivers_id=$(echo "${drivers[*]}" | cksum | cut -d' ' -f1)
{
  flock -w "$setup_limit" 9 || die 125 "another one is still at work on $cache after $setup_limit s" # two that start at once, on a new machine
  packages
  [ -e "$cache/vmlinux-$drivers_id" ] || kernel
  [ -e "$image" ] || boot_image
} 9>"$cache/lock"

started=$SECONDS
job=$(mktemp -d /tmp/rdma-vm.XXXXXX)
qemu=
trap '[ -z "$qemu" ] || kill "$qemu"; rm -r "$job"' EXIT
trap 'exit 143' INT TERM
guest_program >"$job/guest"
{
  export -p
  printf 'cd %q\n' "$PWD"
  printf '%q ' "$@"
} >"$job/command"

net=(-nic none)
if [ -n "$wire" ]; then
  server=on && [ "${wire##*,}" = 1 ] || server=off
  net=(-netdev "stream,id=wire,server=$server,addr.type=unix,addr.path=${wire%,*}"
    -device "virtio-net-pci,netdev=wire,mac=52:54:00:00:00:0${wire##*,}")
fi

# A pipe that this script holds open too: `cat` ends when QEMU has ended, not before, and also if it never starts.
mkfifo "$job/output"
exec 3<>"$job/output"
cat "$job/output" 3>&- &
# no_timer_check: an emulated timer may be late, on a busy machine, and the kernel takes it for broken.
timeout -k 5 "$limit" qemu-system-x86_64 -accel tcg -cpu max,la57=off -smp "$cpus" -m "$memory" \
  -nodefaults -no-user-config -display none -no-reboot "${net[@]}" \
  -kernel "$cache/vmlinux-$drivers_id" -initrd "$image" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check job=$job" -serial "file:$job/console" \
  -device virtio-serial \
  -chardev "file,id=output,path=$job/output" -device virtserialport,chardev=output \
  -chardev "file,id=status,path=$job/status" -device virtserialport,chardev=status \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -virtfs "local,path=$PWD,mount_tag=here,security_model=none,multidevs=remap" </dev/null 3>&- &
qemu=$!
code=0
wait "$qemu" || code=$?
qemu=
exec 3>&-
wait
if [ "$code" -eq 124 ] || [ ! -s "$job/status" ]; then
  [ ! -e "$job/console" ] || tail -n 50 "$job/console" >&2
  [ "$code" -ne 124 ] || die 124 "not done after $limit s: $*"
  die 125 "the guest came to no end (QEMU: $code)"
fi
read -r code booted took <"$job/status"
echo "rdma-vm: set up in $((started - begin)) s, booted in $booted s, at work for $took s: status $code" >&2
exit "$code"
