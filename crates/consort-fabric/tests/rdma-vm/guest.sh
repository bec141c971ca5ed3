# In the guest: what must hold where there is an RDMA device. Sourced by `init`; passes by printing RDMA-TESTS-OK.
# /opt holds the fabric's test program `rdma`, the program `consort` and the reference's checkpoint `llama`.
export RUST_BACKTRACE=0
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

# The same machine by perftest's measure, where it was given along: half of a round trip, in microseconds.
if [ -f /opt/ib_send_lat ]; then
    for bytes in 64 16384; do
        /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 > /tmp/server.log 2>&1 &
        sleep 1
        timeout 30 /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 10.9.0.1 | grep -A1 t_typical
        wait
    done
fi
[ $failed = 0 ] && echo RDMA-TESTS-OK
