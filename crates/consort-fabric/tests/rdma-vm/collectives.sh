# In the guest: the fabric's own tests over RDMA, between processes. $FABRIC_TEST_RDMA makes them run rather than be skipped.
export FABRIC_TEST_RDMA=1 RUST_BACKTRACE=1
timeout 150 /opt/rdma --nocapture --test-threads=1 && echo RDMA-TESTS-OK
