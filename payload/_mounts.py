"""What kind of file system a directory is on, and how its files can be viewed without a signal."""

from __future__ import annotations

from typing import Final, Literal

Access = Literal["map", "through", "copy"]

# Page faults on these fail only with the machine.
LOCAL_TYPES: Final = frozenset(
    {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", "bcachefs"}
)
MEMORY_TYPES: Final = frozenset({"tmpfs", "ramfs"})  # nothing to bring in
# A file that is open here survives unlink and rename. What was read is in the page cache; an error
# of the server shows while reading, where it is an errno and not a signal.
THROUGH_TYPES: Final = frozenset({"nfs4", "lustre", "ceph", "gpfs", "beegfs", "wekafs"})


def access_of(kind: str) -> Access:
    """How files on a file system of type `kind` are viewed by default.

    ``"map"``: mapped; ``"through"``: read once, then mapped; ``"copy"``: read into memory. NFSv3, FUSE
    and what is not known are read: there a mapped page can vanish with the file's name.

    Examples
    --------
    >>> access_of("tmpfs"), access_of("nfs4"), access_of("nfs")
    ('map', 'through', 'copy')
    """
    if kind in LOCAL_TYPES:
        return "map"
    return "through" if kind in THROUGH_TYPES else "copy"


def filesystem_type(fd: int) -> str:
    """Type of the file system an open descriptor is on, as the kernel names it; "" if unknown.

    By mount id: device numbers of btrfs and overlay are not those of the mount table.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}") as info:
            mount = next(line.split()[1] for line in info if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                if left.split(" ", 1)[0] == mount:
                    return right.split(" ", 1)[0]
    except (OSError, StopIteration):
        pass
    return ""
