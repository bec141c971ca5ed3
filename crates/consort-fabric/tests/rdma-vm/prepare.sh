#!/bin/bash
# What the virtual machine of run.sh needs: Debian's packages where a tool is missing, and the guest's kernel, which is kept in
# RDMA_VM_CACHE (default: ~/.cache/consort/rdma-vm). Prints that folder, or fails with one line that says what cannot be had.
set -euo pipefail
cache=${RDMA_VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/consort/rdma-vm}
mkdir -p "$cache"
cannot() { echo "$1"; exit 1; }
update() { [ -n "${updated:-}" ] || apt-get update -qq > /dev/null 2>&1 || cannot "no package index can be reached"; updated=yes; }

# (qemu-utils is left out on purpose: its backport conflicts with qemu-system-x86 of the release.)
for tool in qemu-system-x86_64 busybox cpio depmod xz rdma ip; do
    command -v "$tool" > /dev/null && continue
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || cannot "$tool is missing and cannot be installed"
    update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-x86 busybox-static cpio kmod \
        xz-utils rdma-core ibverbs-providers libibverbs1 iproute2 > /dev/null 2>&1 || cannot "QEMU cannot be installed"
    break
done

# The distribution's generic kernel: its cloud variant has no Soft-RoCE. Only the modules that Soft-RoCE rests on are unpacked.
ls "$cache"/kernel/boot/vmlinuz-* > /dev/null 2>&1 && { echo "$cache"; exit; }
command -v apt-cache > /dev/null || cannot "the guest's kernel comes from Debian's packages, which this system has not"
update
package=$(apt-cache depends linux-image-amd64 2> /dev/null | awk '/Depends:/ { print $2; exit }')
[ -n "$package" ] || cannot "Debian's package linux-image-amd64 is not known here"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq "$package" > /dev/null 2>&1) || cannot "the kernel package $package cannot be fetched"
mkdir "$work/kernel"
dpkg-deb --fsys-tarfile "$work"/linux-image-*.deb | tar -x -C "$work/kernel" --wildcards './boot/vmlinuz*' \
    './lib/modules/*/modules.*' './lib/modules/*/kernel/drivers/infiniband/*' './lib/modules/*/kernel/drivers/net/dummy*' \
    './lib/modules/*/kernel/net/*' './lib/modules/*/kernel/fs/configfs/*' './lib/modules/*/kernel/crypto/*' \
    './lib/modules/*/kernel/arch/x86/crypto/*' './lib/modules/*/kernel/lib/*'
rm -rf "$cache/kernel" && mv "$work/kernel" "$cache/kernel"
echo "$cache"
