//! Compiles this crate, and no other, with `cfg(loom)`.

fn main() {
    println!("cargo::rustc-cfg=loom");
    println!("cargo::rerun-if-changed=build.rs");
}
