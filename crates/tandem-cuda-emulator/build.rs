//! Compiles every file of CUDA kernels as C++ for the host.
//!
//! NVIDIA's compiler joins products and sums into one rounding, but for the kernels that forbid it. So
//! does this, where the machine has the instruction: what depends on it shows in the tests.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

/// Kernels that have the CPU's bits: every product and every sum is rounded. As `not fused` in
/// `tandem-kernels`.
const NOT_FUSED: [&str; 5] = ["dropout", "elementwise", "exact", "optimizer", "pack"];

/// The kernels' files, in one order.
fn sources(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    let mut sources: Vec<PathBuf> =
        entries.into_iter().filter(|path| path.extension().is_some_and(|e| e == "cu")).collect();
    sources.sort();
    Ok(sources)
}

fn main() -> io::Result<()> {
    let folder = Path::new("../tandem-kernels/src/cuda/cu").canonicalize()?;
    let host = Path::new("host").canonicalize()?;
    println!("cargo::rerun-if-changed={}", folder.display());
    println!("cargo::rerun-if-changed={}", host.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut common = cc::Build::new();
    common.cpp(true).std("c++17").opt_level(2).include(&folder).include(&host);
    // What a kernel does not use of its headers is no mistake.
    common.flag("-fno-strict-aliasing").flag("-Wno-unused-function").flag("-Wno-unknown-pragmas");
    common.flag("-fno-math-errno").flag("-Wno-unused-parameter").flag("-Wno-unused-variable");
    let [mut fused, mut build] = [common.clone(), common];
    build.flag("-ffp-contract=off").file(host.join("host.cc"));
    if has_fma() {
        fused.flag("-ffp-contract=fast").flag("-mfma");
    }
    for source in sources(&folder)? {
        let name = source.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let wrapper = out.join(format!("{name}.cc"));
        fs::write(&wrapper, format!("#include \"host.h\"\n#include \"{}\"\n", source.display()))?;
        if NOT_FUSED.contains(&&*name) { &mut build } else { &mut fused }.file(wrapper);
    }
    // Kernels are found by what their files register when the program starts: no symbol names them.
    fused.link_lib_modifier("+whole-archive").compile("tandem_emulated_fused_kernels");
    build.link_lib_modifier("+whole-archive").compile("tandem_emulated_kernels");
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn has_fma() -> bool {
    std::is_x86_feature_detected!("fma")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_fma() -> bool {
    false
}
