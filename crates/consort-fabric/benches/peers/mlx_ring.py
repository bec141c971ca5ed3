"""The all-reduce of MLX's TCP ring, timed as netbench times its own. Started by mlx.launch."""

import json
import time

import mlx.core as mx

world = mx.distributed.init(backend="ring", strict=True)
mx.set_default_device(mx.cpu)
size = 1024
while size <= 64 << 20:
    values = mx.ones((size // 4,), dtype=mx.float32)
    mx.eval(values)
    times = []
    for repetition in range(-2, 200 if size <= 256 << 10 else 20 if size <= 4 << 20 else 5):
        mx.eval(mx.distributed.all_sum(mx.ones((1,))))
        start = time.perf_counter()
        mx.eval(mx.distributed.all_sum(values))
        if repetition >= 0:
            times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    if world.rank() == 0:
        line = {"collective": "all_reduce", "bytes": size, "min_us": times[0], "median_us": times[len(times) // 2]}
        print(json.dumps(line), flush=True)
    size *= 4
