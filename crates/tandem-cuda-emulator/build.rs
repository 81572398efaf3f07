//! Compiles every file of CUDA kernels as C++ for the host.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

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
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").opt_level(2).include(&folder).include(&host).file(host.join("host.cc"));
    // Sums are rounded where kernels say so; what a kernel does not use of its headers is no
    // mistake.
    build
        .flag("-ffp-contract=off")
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unused-function")
        .flag("-Wno-unknown-pragmas");
    build.flag("-fno-math-errno").flag("-Wno-unused-parameter").flag("-Wno-unused-variable");
    for source in sources(&folder)? {
        let name = source.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let wrapper = out.join(format!("{name}.cc"));
        fs::write(&wrapper, format!("#include \"host.h\"\n#include \"{}\"\n", source.display()))?;
        build.file(wrapper);
    }
    // Kernels are found by what their files register when the program starts: no symbol names them.
    build.link_lib_modifier("+whole-archive").compile("tandem_emulated_kernels");
    Ok(())
}
