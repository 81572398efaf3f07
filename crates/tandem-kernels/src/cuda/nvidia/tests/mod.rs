//! The driver over stand-ins for NVIDIA's libraries, and over the real ones as far as they go
//! without a GPU.

mod autotune;
mod graphs;
mod inventory;
mod kernels;
mod links;
mod memory;
mod opening;
mod products;
mod real;

/// A temporary folder, removed at the end.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        Self(tempfile::Builder::new().prefix(&format!("tandem-{name}-")).tempdir().unwrap().keep())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
