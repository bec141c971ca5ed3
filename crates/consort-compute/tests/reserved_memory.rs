//! Memory that is reserved costs nothing until it is written. Alone in its process, which it measures.
#![cfg(target_os = "linux")]

use consort_compute::portable::{ALIGNMENT_BYTES, AlignedBytes};

/// What is resident, in bytes.
fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

#[test]
fn reserved_memory_is_not_resident() {
    let before = resident_bytes();
    let reserved = AlignedBytes::zeroed(1 << 30);
    assert!(resident_bytes() < before + (16 << 20), "{} of 1 GiB", resident_bytes() - before);
    // Where large pages begin.
    assert!(reserved.as_ptr().addr().is_multiple_of(2 << 20));
    assert!(reserved.iter().step_by(4096).all(|&byte| byte == 0));
    let small = AlignedBytes::zeroed(1000);
    assert!(small.as_ptr().addr().is_multiple_of(ALIGNMENT_BYTES));
}
