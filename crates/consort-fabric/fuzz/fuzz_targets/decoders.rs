//! Whatever a peer sends, decoding it ends in a message or in an error.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    consort_fabric::fuzzing::decode(bytes);
});
