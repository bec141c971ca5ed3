# In the guest: the fabric's own tests over RDMA, between processes. $FABRIC_TEST_RDMA makes them run rather than be skipped.
export FABRIC_TEST_RDMA=1 RUST_BACKTRACE=0
timeout 150 /opt/rdma --nocapture --test-threads=1 && echo RDMA-TESTS-OK
# The same machine by perftest's measure, where it was given along: half of a round trip, in microseconds.
if [ -f /opt/ib_send_lat ]; then
    for bytes in 64 16384; do
        /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 > /tmp/server.log 2>&1 &
        sleep 1
        timeout 30 /opt/ib_send_lat -d rxe0 -x 1 -c RC -s $bytes -n 300 10.9.0.1 | grep -A1 t_typical
        wait
    done
fi
