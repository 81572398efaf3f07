//! Compiles the shim around Gloo for the feature `gloo`: needs a C++ compiler and `libgloo-dev`.

fn main() {
    println!("cargo::rerun-if-changed=src/engines/gloo/shim.cc");
    #[cfg(feature = "gloo")]
    {
        let compiled = cc::Build::new()
            .cpp(true)
            .std("c++17")
            .file("src/engines/gloo/shim.cc")
            .try_compile("tandem_gloo_shim");
        if let Err(error) = compiled {
            panic!(
                "the feature `gloo` needs a C++ compiler and Gloo's headers (Debian: libgloo-dev): {error}"
            );
        }
        println!("cargo::rustc-link-lib=dylib=gloo");
    }
}
