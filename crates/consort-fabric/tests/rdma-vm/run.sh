#!/bin/bash
# RDMA for real, without RDMA hardware: boots a small virtual machine whose kernel has Soft-RoCE, and runs a script in it.
# usage: run.sh GUEST_SCRIPT FILE...   FILEs and folders, with the libraries that they need, appear in /opt of the guest.
# Passes when the guest prints RDMA-TESTS-OK. prepare.sh installs what is missing. No KVM is needed: QEMU interprets, and boots in
# a few seconds.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
script=$1; shift
cache=$("$here/prepare.sh") || { echo "$cache" >&2; exit 1; }
kernel=$(ls "$cache"/kernel/boot/vmlinuz-*)
version=${kernel##*/vmlinuz-}

root=$(mktemp -d); trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{bin,proc,sys,dev,tmp,opt,modules,etc/libibverbs.d,usr/bin}
with_libraries() { # FILE TARGET: copies the file, and what it is linked with
    mkdir -p "$(dirname "$root$2")"; cp -rL "$1" "$root$2"
    (ldd "$1" 2> /dev/null || true) | awk '/=> \//{ print $3 } /^\t\/lib/{ print $1 }' | while read -r library; do
        mkdir -p "$root$(dirname "$library")"; cp -Lu "$library" "$root$library"
    done
}
with_libraries "$(command -v busybox)" /bin/busybox
for tool in rdma ip; do with_libraries "$(command -v $tool)" /usr/bin/$tool; done
# The verbs library is opened at run time, and opens its provider in turn: nothing is linked with them.
providers=/usr/lib/x86_64-linux-gnu/libibverbs
for library in /usr/lib/x86_64-linux-gnu/libibverbs.so.1 "$providers"/librxe-rdmav*.so /lib/x86_64-linux-gnu/libgcc_s.so.1; do
    with_libraries "$library" "$library"
done
cp /etc/libibverbs.d/rxe.driver "$root/etc/libibverbs.d/"
for file in "$script" "$@"; do with_libraries "$file" "/opt/$(basename "$file")"; done
# Symbols are of no use in there, and take memory.
find "$root/opt" -maxdepth 1 -type f -perm -u+x -exec strip {} + 2> /dev/null || true

# Modules in the order in which they must be loaded. Soft-RoCE asks for crc32 by name, which no dependency says.
depmod -b "$cache/kernel" "$version" 2> /dev/null
for module in crc32_generic dummy ib_uverbs rdma_ucm rdma_rxe; do
    modprobe -d "$cache/kernel" -S "$version" --show-depends "$module" 2> /dev/null | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++' | while read -r module; do
    name=$(basename "${module%.xz}")
    if [[ $module == *.xz ]]; then xz -dc "$module" > "$root/modules/$name"; else cp "$module" "$root/modules/$name"; fi
    echo "$name" >> "$root/modules/order"
done
cp "$here/init" "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) > "$root.cpio.gz"; trap 'rm -rf "$root" "$root.cpio.gz"' EXIT

# Two processors: with one, a polling process starves the kernel's half of Soft-RoCE. Their time-stamp counters are one emulated
# clock; if the guest did not trust them, each look at the clock would be a system call, as on no real machine.
timeout "${RDMA_VM_TIMEOUT:-180}" qemu-system-x86_64 -accel tcg -cpu max -smp 2 -m 1024 -nodefaults -no-reboot -display none \
    -serial stdio -kernel "$kernel" -initrd "$root.cpio.gz" \
    -append "console=ttyS0 quiet panic=-1 tsc=reliable clocksource=tsc script=$(basename "$script")" | tr -d '\r' | tee "$cache/console.log"
grep -q '^RDMA-TESTS-OK' "$cache/console.log"
