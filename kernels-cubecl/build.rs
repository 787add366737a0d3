//! Lets CubeCL's cpu runtime find the function of `tests/libcalls` in the test programs.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        println!("cargo::rustc-link-arg-tests=-Wl,--export-dynamic-symbol=__truncsfbf2");
    }
}
