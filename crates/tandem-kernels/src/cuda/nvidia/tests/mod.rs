//! The driver over stand-ins for NVIDIA's libraries, and over the real ones as far as they go
//! without a GPU.

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
        let path = std::env::temp_dir().join(format!("tandem-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
