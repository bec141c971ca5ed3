#!/bin/bash
# All-reduce beside OpenMPI and the MLX ring, in one run on one machine, taking turns so that all see the same noise.
# usage: compare.sh [RANKS] [TURNS]; MLX=path of a virtual environment with mlx (left out otherwise)
set -euo pipefail
cd "$(dirname "$0")/../.."
ranks=${1:-2} turns=${2:-3}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
cargo build --quiet --release --example netbench
netbench=${CARGO_TARGET_DIR:-../../target}/release/examples/netbench
mpicc -O3 -march=native -o "$work/openmpi" benches/peers/openmpi.c
mpi="mpirun --allow-run-as-root --oversubscribe -n $ranks"
for turn in $(seq "$turns"); do
    "$netbench" "$ranks" shm 67108864 all_reduce > "$work/consort-shm.$turn"
    $mpi --mca btl self,vader "$work/openmpi" > "$work/openmpi-shm.$turn" 2>/dev/null
    "$netbench" "$ranks" tcp 67108864 all_reduce > "$work/consort-tcp.$turn"
    $mpi --mca btl self,tcp --mca btl_tcp_if_include lo "$work/openmpi" > "$work/openmpi-tcp.$turn" 2>/dev/null
    if [ -n "${MLX:-}" ]; then
        timeout 120 "$MLX/bin/mlx.launch" -n "$ranks" --backend ring "$MLX/bin/python" benches/peers/mlx_ring.py 2>/dev/null |
            grep '^{' > "$work/mlx-ring.$turn" || true
    fi
done
python3 - "$work" <<'PYTHON'
import collections, glob, json, os, statistics, sys
rows, columns = collections.defaultdict(lambda: collections.defaultdict(list)), []
for path in sorted(glob.glob(sys.argv[1] + "/*.[0-9]*")):
    peer = os.path.basename(path).split(".")[0]
    columns += [peer] if peer not in columns else []
    for line in open(path):
        result = json.loads(line)
        if result["collective"].startswith("all_reduce"):
            rows[result["collective"], result["bytes"]][peer].append((result["min_us"], result["median_us"]))
print(f"microseconds, min / median; the best of {len(glob.glob(sys.argv[1] + '/consort-shm.*'))} turns")
print(f"{'':18}{'bytes':>10}" + "".join(f"{column:>22}" for column in columns))
for (collective, size), cells in rows.items():
    show = lambda values: "-" if not values else f"{min(v[0] for v in values):.1f} / {min(v[1] for v in values):.1f}"
    print(f"{collective:18}{size:10}" + "".join(f"{show(cells.get(column)):>22}" for column in columns))
PYTHON
