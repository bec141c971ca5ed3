# In the guest: what must hold where there is an RDMA device. Sourced by `init`; passes by printing RDMA-TESTS-OK.
# /opt holds the fabric's test program `rdma`, the program `consort` and the reference's checkpoint `llama`.
export RUST_BACKTRACE=0
# The emulator works through repeated string instructions byte by byte, and libc would copy with them.
export GLIBC_TUNABLES=glibc.cpu.x86_rep_movsb_threshold=1000000000
failed=0

# The fabric's own tests between processes. The variable makes them run rather than be skipped.
FABRIC_TEST_RDMA=1 timeout 100 /opt/rdma --nocapture --test-threads=1 || failed=1

# One model: what two ranks answer over RDMA is what one rank answers, and what the reference says.
list() { sed -n "s/.*\"$1\": *\[\([0-9, ]*\)\].*/\1/p" | tr -d ' '; }
prompt=$(tr -d '\n' < /opt/llama/expected.json | list prompt)
reference=$(tr -d '\n' < /opt/llama/expected.json | list continuation)
generate() {
    timeout 60 /opt/consort generate -m /opt/llama --tokens "$prompt" --max-tokens 32 --ignore-eos --threads 1 \
        --activations exact --kv-format f32 --json "$@" 2> /tmp/errors || cat /tmp/errors
}
for run in "--plan tensor:1" "--plan tensor:2 --transport rdma" "--plan pipeline:2 --transport rdma"; do
    answer=$(generate $run)
    tokens=$(echo "$answer" | list tokens)
    transport=$(echo "$answer" | sed -n 's/.*"conditions".*"transport": *"\([^"]*\)".*/\1/p')
    echo "generate $run: over $transport: $tokens"
    [ -n "$tokens" ] && [ "$tokens" = "$reference" ] || { echo "expected: $reference"; failed=1; }
    case "$run:$transport" in *rdma:rdma | *tensor:1:*) ;; *) failed=1 ;; esac
done

# Two ranks that look like two machines (they see different process numbers) and were told of a device at both ends: asked for no
# transport in particular, they take RDMA and say why.
echo '[[null, "rxe0"], ["rxe0", null]]' > /tmp/devices.json
export MLX_IBV_DEVICES=/tmp/devices.json MLX_JACCL_COORDINATOR=127.0.0.1:5000
MLX_RANK=1 unshare -pf /opt/consort generate -m /opt/llama --plan tensor:2 --threads 1 --activations exact --kv-format f32 \
    --tokens "$prompt" --max-tokens 32 --ignore-eos > /tmp/rank1.log 2>&1 &
tokens=$(MLX_RANK=0 generate --plan tensor:2 | list tokens)
wait
unset MLX_IBV_DEVICES MLX_JACCL_COORDINATOR
cat /tmp/errors
[ "$tokens" = "$reference" ] || { cat /tmp/rank1.log; failed=1; }
grep -q 'rank 1 over rdma (both ends list devices, and a message came through)' /tmp/errors || failed=1

# Round trips beside those of perftest on the same machine, in turns, where it was given along.
if [ -f /opt/ib_send_lat ]; then
    for turn in 1 2 3; do
        FABRIC_TEST_RDMA=1 timeout 100 /opt/rdma round_trips --nocapture --test-threads=1 2>&1 | grep medians
        for bytes in 64 16384; do
            /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 > /tmp/server.log 2>&1 &
            sleep 1
            timeout 30 /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 10.9.0.1 |
                awk -v bytes=$bytes '$1 == bytes { print "ib_send_lat: " bytes " bytes " 2 * $5 " us there and back" }'
            wait
        done
    done
fi
[ $failed = 0 ] && echo RDMA-TESTS-OK
