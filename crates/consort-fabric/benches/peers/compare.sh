#!/bin/bash
# All-reduce beside OpenMPI and the MLX ring, in one run on one machine, taking short turns so that all see the same noise. Each rank
# is bound to a core; where ranks outnumber cores, Consort's share cores in turn and OpenMPI's go where the system puts them.
# usage: compare.sh [RANKS] [TURNS] [LARGEST_BYTES]; MLX=path of a virtual environment with mlx (left out otherwise)
set -euo pipefail
cd "$(dirname "$0")/../.."
ranks=${1:-2} turns=${2:-5} largest=${3:-67108864}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cargo build --quiet --release --example netbench
netbench=${CARGO_TARGET_DIR:-../../target}/release/examples/netbench
mpicc -O3 -march=native -o "$work/openmpi" benches/peers/openmpi.c
bind="--bind-to core --map-by core"
[ "$ranks" -le "$(nproc)" ] || bind="--oversubscribe --bind-to none"
mpi="mpirun --allow-run-as-root $bind -n $ranks"
for turn in $(seq "$turns"); do
    "$netbench" "$ranks" shm "$largest" all_reduce > "$work/consort-shm.$turn"
    $mpi --mca btl self,vader "$work/openmpi" "$largest" > "$work/openmpi-shm.$turn" 2>/dev/null
    "$netbench" "$ranks" tcp "$largest" all_reduce > "$work/consort-tcp.$turn"
    $mpi --mca btl self,tcp --mca btl_tcp_if_include lo "$work/openmpi" "$largest" > "$work/openmpi-tcp.$turn" 2>/dev/null
    if [ -n "${MLX:-}" ]; then
        timeout 120 "$MLX/bin/mlx.launch" -n "$ranks" --backend ring "$MLX/bin/python" benches/peers/mlx_ring.py "$largest" \
            2>/dev/null | grep '^{' > "$work/mlx-ring.$turn" || true
    fi
done
python3 - "$work" "$turns" <<'PYTHON'
import collections, glob, json, os, statistics, sys
rows, columns = collections.defaultdict(lambda: collections.defaultdict(list)), []
for path in sorted(glob.glob(sys.argv[1] + "/*.[0-9]*"), key=lambda path: int(path.rsplit(".", 1)[1])):
    peer = os.path.basename(path).split(".")[0]
    columns += [peer] if peer not in columns else []
    for line in open(path):
        result = json.loads(line)
        if result["collective"].startswith("all_reduce"):
            rows[result["collective"], result["bytes"]][peer].append((result["min_us"], result["median_us"]))
print(f"microseconds, min / median; the median of {sys.argv[2]} turns, and OpenMPI's median by ours, turn by turn")
print(f"{'':18}{'bytes':>10}" + "".join(f"{column:>22}" for column in columns) + f"{'shm':>8}{'tcp':>8}")
for (collective, size), cells in rows.items():
    median = lambda values, at: statistics.median(value[at] for value in values)
    show = lambda values: "-" if not values else f"{median(values, 0):.1f} / {median(values, 1):.1f}"
    pairs = lambda way: zip(cells["openmpi-" + way], cells["consort-" + way])
    ratio = lambda way: f"{statistics.median(peer[1] / own[1] for peer, own in pairs(way)):.2f}"
    print(f"{collective:18}{size:10}" + "".join(f"{show(cells.get(column)):>22}" for column in columns)
          + "".join(f"{ratio(way):>8}" for way in ["shm", "tcp"]))
PYTHON
