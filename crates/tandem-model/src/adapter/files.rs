//! Tensors of an adapter, read into flat f32 buffers one layer at a time.

use std::collections::HashSet;

use rayon::prelude::*;

use super::pieces::{PREFIX, adapter_name, pieces, tied_copy};
use crate::decoder::Decoder;
use crate::families::{Family, HfTensor, family_named};
use crate::io::{Source, WeightFiles, read_sources, widened};
use crate::io::{StoredType, TensorArchive};
use crate::layout::ParamKind;
use crate::lora::LoraTarget;
use crate::{ModelError, Result};

/// Weights of an adapter on disk, checked against a decoder.
pub struct AdapterFiles {
    archive: TensorArchive,
    /// Trained tensors of each layer by [`Decoder::index`], under their names in the file.
    layers: Vec<Vec<Source>>,
    heads: usize,
    /// The decoder, if it is a tensor-parallel shard.
    shard: Option<Box<Decoder>>,
    /// Copies of the base's weights in the file, with their possible names in the base.
    copies: Vec<(String, Vec<String>)>,
}

impl AdapterFiles {
    /// Finds every tensor of the decoder's adapter.
    pub(super) fn new(archive: TensorArchive, decoder: &Decoder) -> Result<Self> {
        let whole = decoder.whole();
        let family = family_named(whole.spec().family).expect("specs come from families");
        let (mut problems, mut used, mut layers) = (Vec::new(), HashSet::new(), Vec::new());
        let tied = tied_copy(family, whole);
        let mut tied_name = None;
        for layer in whole.layers() {
            let mut found = pieces(family, whole, layer);
            for piece in &mut found {
                match locate(&archive, family, piece) {
                    Ok(name) => piece.name = name,
                    Err(problem) => problems.push(problem),
                }
                used.insert(piece.name.clone());
            }
            layers.push(found);
        }
        if let Some(mut piece) = tied {
            match locate(&archive, family, &piece) {
                Ok(name) => piece.name = name,
                Err(problem) => problems.push(format!(
                    "{problem}: the model's head is its token table (tie_word_embeddings), which this adapter trains apart from the head"
                )),
            }
            used.insert(piece.name.clone());
            tied_name = Some(piece);
        }
        let mut copies = Vec::new();
        let mut left: Vec<&str> = archive.names().into_iter().filter(|name| !used.contains(*name)).collect();
        left.sort_unstable();
        for name in left {
            match copied(whole, family, name) {
                Some(base) => copies.push((name.to_owned(), base)),
                None => {
                    let shape = archive.get(name).map(|tensor| tensor.shape).unwrap_or_default();
                    problems.push(format!("left over: {name} {shape:?}"));
                }
            }
        }
        if let Some(copy) = tied_name.filter(|_| problems.is_empty()) {
            let table = layers.iter().flatten().find(|piece| piece.part == copy.part).expect("it is copied");
            if !is_equal(&archive, &table.name, &archive, &copy.name) {
                problems.push(format!(
                    "left over: {} differs from {}, but tie_word_embeddings makes them one",
                    copy.name, table.name
                ));
            }
        }
        if !problems.is_empty() {
            return Err(ModelError::Tensors {
                path: archive.path().to_owned(),
                config: super::peft::CONFIG,
                problems,
            });
        }
        let mut held = |layer| std::mem::take(&mut layers[whole.index(layer)]);
        let layers =
            decoder.layers().into_iter().map(|layer| held(layer).into_iter().map(Source::from).collect());
        let layers = layers.collect();
        let shard = (decoder.slice().count > 1).then(|| Box::new(decoder.clone()));
        Ok(Self { archive, layers, heads: whole.spec().attention.heads, shard, copies })
    }

    /// Fills the flat buffer of a layer's trained parameters (`trained(layer).len` elements);
    /// padding becomes zero. `index` is [`Decoder::index`]. A tensor-parallel shard is cut from the whole
    /// layer.
    ///
    /// # Errors
    /// A weight is not finite.
    pub fn read_layer(&self, index: usize, flat: &mut [f32]) -> Result<()> {
        if let Some(decoder) = &self.shard {
            let layer = decoder.layers()[index];
            let mut all = vec![0.0; decoder.whole().trained(layer).len];
            read_sources(&self.archive, &self.layers[index], self.heads, 0..all.len(), &mut all)?;
            decoder.cut_trained(layer, &all, flat);
            return Ok(());
        }
        read_sources(&self.archive, &self.layers[index], self.heads, 0..flat.len(), flat)
    }

    /// Checks that the tables which `peft` copies into the file (those that are targets) are the
    /// base's: else the adapter belongs to another base.
    pub fn check_base(&self, base: &WeightFiles) -> Result<()> {
        let differs = |(copy, names): &&(String, Vec<String>)| {
            !names.iter().any(|name| is_equal(&self.archive, copy, base.archive(), name))
        };
        let problems: Vec<String> = self
            .copies
            .iter()
            .filter(differs)
            .map(|(copy, names)| {
                format!(
                    "left over: {copy} is no copy of the base's {}; the adapter is another base's",
                    names[0]
                )
            })
            .collect();
        if problems.is_empty() {
            return Ok(());
        }
        Err(ModelError::Tensors {
            path: self.archive.path().to_owned(),
            config: super::peft::CONFIG,
            problems,
        })
    }
}

/// Returns the name under which a tensor is stored, or the problem with it.
fn locate(archive: &TensorArchive, family: &Family, piece: &HfTensor) -> Result<String, String> {
    let Some((name, stored)) =
        spellings(family, &piece.name).into_iter().find_map(|n| Some((n.clone(), archive.get(&n)?)))
    else {
        return Err(format!("missing: {} {:?}", piece.name, piece.shape));
    };
    if let StoredType::Other(dtype) = &stored.dtype {
        return Err(format!("wrong type: {name} is {dtype}, expected f32, bf16 or f16"));
    }
    // Older versions stored the magnitudes of some layers as a matrix of one row or column.
    let is_vector = piece.shape.len() == 1 && stored.shape.iter().product::<usize>() == piece.shape[0];
    if stored.shape != piece.shape && !is_vector {
        return Err(format!("wrong shape: {name} is {:?}, expected {:?}", stored.shape, piece.shape));
    }
    Ok(name)
}

/// Lists the spellings of a name in versions of `peft` and `transformers`.
fn spellings(family: &Family, name: &str) -> Vec<String> {
    let mut names = vec![name.to_owned()];
    // The name in the model's files is the name in memory of older versions.
    let older = name.strip_prefix(PREFIX).and_then(|name| family.name_in_files(name));
    names.extend(older.map(|name| format!("{PREFIX}{name}")));
    let mut older = Vec::new();
    for name in &names {
        if name.ends_with("lora_magnitude_vector") {
            older.push(format!("{name}.weight"));
        } else if let Some((module, kind)) = name.rsplit_once('.').filter(|_| !name.contains(".lora_")) {
            older.push(format!("{module}.modules_to_save.{kind}"));
            older.push(format!("{module}.modules_to_save.default.{kind}"));
        }
    }
    names.extend(older);
    names
}

/// Returns the possible names of the base's tensor that `name` copies, if it does: `peft` copies
/// targeted tables into the file.
fn copied(decoder: &Decoder, family: &Family, name: &str) -> Option<Vec<String>> {
    let (module, kind) = name.rsplit_once(".base_layer.")?;
    let adapted = decoder.adapter()?.matrices();
    let adapted = adapted.iter().find(|adapted| {
        let name = |site: &LoraTarget| adapter_name(family, &site.module);
        adapted.sites.iter().any(|site| spellings(family, &name(site)).iter().any(|known| known == module))
    })?;
    let is_tied = adapted.part == ParamKind::HeadWeight && decoder.spec().head.tied;
    let own = family.modules(if is_tied { ParamKind::TokenTable } else { adapted.part }).next()?;
    let own = format!("{own}.{kind}");
    // A folder saved from the bare model leaves the prefix off.
    let short = own.strip_prefix(family.base_prefix).map(str::to_owned);
    Some(std::iter::once(own).chain(short).collect())
}

/// Returns whether two stored tensors exist and are equal.
fn is_equal(archive: &TensorArchive, name: &str, other: &TensorArchive, other_name: &str) -> bool {
    let (Some(a), Some(b)) = (archive.get(name), other.get(other_name)) else { return false };
    if a.shape != b.shape {
        return false;
    }
    if a.dtype == b.dtype {
        return a.bytes == b.bytes;
    }
    if [&a.dtype, &b.dtype].into_iter().any(|dtype| matches!(dtype, StoredType::Other(_))) {
        return false;
    }
    const BLOCK: usize = 1 << 16;
    let len: usize = a.shape.iter().product();
    (0..len.div_ceil(BLOCK)).into_par_iter().all(|block| {
        let range = block * BLOCK..len.min((block + 1) * BLOCK);
        widened(&a.dtype, a.bytes, range.clone()) == widened(&b.dtype, b.bytes, range)
    })
}
