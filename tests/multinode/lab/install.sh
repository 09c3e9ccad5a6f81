#!/bin/sh
# The Debian packages the lab needs, if they are not here; without root or apt the suite says what it lacks.
for tool in linux.uml ip tc unshare nsenter setpriv taskset mkfs.ext4 cc; do
    command -v "$tool" >/dev/null || missing="$missing $tool"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing for$missing ..."
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
        --no-install-recommends user-mode-linux iproute2 util-linux e2fsprogs gcc libc6-dev
fi || echo "could not install:$missing"
exit 0
