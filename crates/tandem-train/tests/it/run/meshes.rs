//! Meshes on which a run must have the bits of one rank: over threads here, over processes in the command's tests, and over hosts in
//! tools/clusters.

/// Division of a run among ranks: the keys of `[compute]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    pub ranks: usize,
    pub sharding: &'static str,
    pub replicate: usize,
    pub tensor: usize,
    pub pipeline: usize,
}

impl Mesh {
    /// A mesh of data axes alone.
    pub const fn data(ranks: usize, sharding: &'static str, replicate: usize) -> Self {
        Self { ranks, sharding, replicate, tensor: 1, pipeline: 1 }
    }

    /// Returns whether every data rank has a whole model.
    pub const fn has_whole_models(&self) -> bool {
        self.tensor == 1 && self.pipeline == 1
    }

    /// Returns the settings, without the devices.
    pub fn settings(&self) -> [String; 4] {
        let Self { sharding, replicate, tensor, pipeline, .. } = self;
        [
            format!("compute.sharding={sharding}"),
            format!("compute.replicate={replicate}"),
            format!("compute.tensor={tensor}"),
            format!("compute.pipeline={pipeline}"),
        ]
    }

    fn parse(line: &'static str) -> Self {
        let words: Vec<&str> = line.split(' ').collect();
        let [ranks, sharding, replicate, tensor, pipeline] = words[..] else { panic!("{line:?}") };
        let [ranks, replicate, tensor, pipeline] =
            [ranks, replicate, tensor, pipeline].map(|word| word.parse().expect(line));
        Self { ranks, sharding, replicate, tensor, pipeline }
    }
}

/// Returns all meshes. Of those with a divided model 4 must divide the number of key/value heads, and 2 the blocks.
pub fn all() -> Vec<Mesh> {
    let lines = include_str!("meshes.txt").lines();
    lines.filter(|line| !line.starts_with('#')).map(Mesh::parse).collect()
}
