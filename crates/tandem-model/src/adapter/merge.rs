//! Merge of an adapter into its base, layer by layer: `W + s · B A`, with DoRA each row at its own
//! length.

use std::ops::Range;

use rayon::prelude::*;
use tandem_kernels::{DType, Device, MemoryKind};

use super::PeftFolder;
use super::files::AdapterFiles;
use crate::Result;
use crate::decoder::Decoder;
use crate::io::ModelFolder;
use crate::io::WeightFiles;
use crate::layout::{LayerId, LayerLayout, ParamKind};
use crate::lora::{Adapted, Adapter};
use crate::weights::FlatWeights;

/// Base model with an adapter merged into it, read one layer at a time.
///
/// If the base's head is its token table and the adapter changes one of the two, they part: the
/// merged model has a head of its own.
pub struct Merged {
    /// Base with its adapter.
    parts: Decoder,
    base: WeightFiles,
    adapter: AdapterFiles,
    /// Merged model.
    decoder: Decoder,
}

impl Merged {
    /// Opens the weights of both. `positions` is that of [`Decoder::new`].
    ///
    /// # Errors
    /// A folder cannot be read, the adapter does not fit, or was trained on random weights.
    pub fn open(model: &ModelFolder, folder: &PeftFolder, positions: usize) -> Result<Self> {
        folder.check_kept_base()?;
        let spec = model.spec();
        let adapter = Adapter::new(folder.config().clone(), spec)?;
        let parted = spec.head.tied
            && [ParamKind::TokenTable, ParamKind::HeadWeight]
                .into_iter()
                .any(|part| adapter.get(part).is_some());
        let mut merged = spec.clone();
        merged.head.tied &= !parted;
        let parts = Decoder::new(spec.clone(), positions)?.with_adapter(adapter);
        let (base, adapter) = (model.weights(&parts)?, folder.weights(&parts)?);
        adapter.check_base(&base)?;
        Ok(Self { parts, base, adapter, decoder: Decoder::new(merged, positions)? })
    }

    /// Returns the merged model.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Fills the flat f32 buffer of a layer of the merged model (`decoder().layout(layer).len`
    /// elements).
    ///
    /// # Errors
    /// A weight of the base or the adapter is not finite.
    pub fn read_layer(&self, layer: LayerId, flat: &mut [f32]) -> Result<()> {
        let (parts, layout) = (&self.parts, self.decoder.layout(layer));
        let (base, trained) = (parts.layout(layer), parts.trained(layer));
        let index = parts.index(layer);
        if base.params == layout.params {
            self.base.read_layer(index, flat)?;
        } else {
            // The head gets a matrix of its own.
            flat.fill(0.0);
            let mut values = vec![0.0; base.len];
            self.base.read_layer(index, &mut values)?;
            copy(base, &values, layout, flat);
            self.read_table(&mut flat[layout.param(ParamKind::HeadWeight).expect("it is parted").range()])?;
        }
        let mut values = vec![0.0; trained.len];
        self.adapter.read_layer(index, &mut values)?;
        copy(trained, &values, layout, flat);
        self.add(trained, &values, layout, flat);
        if base.params != layout.params {
            // The head's term lies in the embedding layer, with the table.
            let trained = parts.trained(LayerId::Embedding);
            let mut values = vec![0.0; trained.len];
            self.adapter.read_layer(parts.index(LayerId::Embedding), &mut values)?;
            self.add(trained, &values, layout, flat);
        }
        Ok(())
    }

    /// Adds the terms in `values` to the layer's matrices.
    fn add(&self, trained: &LayerLayout, values: &[f32], layout: &LayerLayout, flat: &mut [f32]) {
        let adapter = self.parts.adapter().expect("it was made with one");
        for adapted in adapter.matrices() {
            let has_term = adapted.part.low_rank().is_some_and(|parts| trained.param(parts.a).is_some());
            if let Some(param) = layout.param(adapted.part).filter(|_| has_term) {
                merge(adapter, adapted, trained, values, param.cols, &mut flat[param.range()]);
            }
        }
    }

    /// Reads the base's token table.
    fn read_table(&self, out: &mut [f32]) -> Result<()> {
        let layout = self.parts.layout(LayerId::Embedding);
        let mut values = vec![0.0; layout.len];
        self.base.read_layer(self.parts.index(LayerId::Embedding), &mut values)?;
        out.copy_from_slice(
            &values[layout.param(ParamKind::TokenTable).expect("every model has one").range()],
        );
        Ok(())
    }

    /// Reads every layer into device memory of the given kind.
    pub fn load(&self, device: &Device, kind: MemoryKind) -> Result<FlatWeights> {
        let mut layers = Vec::new();
        for layer in self.decoder.layers() {
            let mut flat = device.alloc(kind, 1, self.decoder.layout(layer).len, DType::F32)?;
            device.host_write(flat.view_mut(), |flat| self.read_layer(layer, flat))?.transpose()?;
            layers.push(flat);
        }
        Ok(FlatWeights { layers })
    }
}

/// Copies the parameters that both layouts have.
fn copy(from: &LayerLayout, values: &[f32], to: &LayerLayout, out: &mut [f32]) {
    for param in &from.params {
        if let Some(place) = to.param(param.part) {
            out[place.range()].copy_from_slice(&values[param.range()]);
        }
    }
}

/// Adds the terms to a matrix with rows of `cols`.
fn merge(
    adapter: &Adapter,
    adapted: &Adapted,
    layout: &LayerLayout,
    values: &[f32],
    cols: usize,
    matrix: &mut [f32],
) {
    let (rank, scale) = (adapter.config().rank, adapter.scale());
    let parts = adapted.part.low_rank().expect("it has terms");
    let of = |part: ParamKind| layout.param(part).map(|param| &values[param.range()]);
    let (a, b) = of(parts.a).zip(of(parts.b)).expect("every term has two factors");
    if adapted.part == ParamKind::TokenTable {
        // Row `t` of the table gets `s · B A[t]`.
        matrix.par_chunks_mut(cols).zip(a.par_chunks(rank)).for_each(|(row, a)| {
            for (value, b) in row.iter_mut().zip(b.chunks(rank)) {
                let delta: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                *value += scale * delta;
            }
        });
        return;
    }
    let magnitudes = parts.magnitude.and_then(of);
    for (index, site) in adapted.sites.iter().enumerate() {
        let a = &a[index * rank * cols..(index + 1) * rank * cols];
        let elements = |rows: &Range<usize>, width: usize| rows.start * width..rows.end * width;
        let b = &b[elements(&site.b_rows, rank)];
        let magnitudes = magnitudes.map(|all| &all[site.b_rows.clone()]);
        let rows =
            matrix[elements(&site.rows, cols)].par_chunks_mut(cols).zip(b.par_chunks(rank)).enumerate();
        rows.for_each_init(
            || vec![0.0; cols],
            |delta, (index, (row, b))| {
                delta.fill(0.0);
                for (b, a) in b.iter().zip(a.chunks(cols)) {
                    delta.iter_mut().zip(a).for_each(|(delta, a)| *delta += b * a);
                }
                row.iter_mut().zip(&*delta).for_each(|(value, delta)| *value += scale * delta);
                if let Some(magnitudes) = magnitudes {
                    let square: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                    let factor = (f64::from(magnitudes[index]) / square.sqrt()) as f32;
                    row.iter_mut().for_each(|value| *value *= factor);
                }
            },
        );
    }
}
