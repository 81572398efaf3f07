//! Matmuls of a run on GPUs, from a dry run of its steps.

use std::collections::BTreeMap;

use tandem_comm::recorder;
use tandem_kernels::cuda::driver::Matmul;
use tandem_kernels::cuda::matmul::{rounded, token_counts};

use super::survey::{BatchStatistics, MicroBatchCounts};
use super::{PlanInputs, dry_run, step};
use crate::Result;
use crate::config::{ComputeConfig, Config, ReferenceKind};
use crate::parallel::DeviceMesh;
use crate::placement::MemoryPlacement;
use crate::recipe::MicroBatch;

/// Most rounded numbers of tokens whose matmuls are listed: those of most of the run's tokens.
const COUNTS: usize = 4;

/// Two micro-batches: the first overwrites gradients, the second adds to them.
const TWO: MicroBatchCounts = MicroBatchCounts { own: 2, all: 2 };

/// Returns a matmul of each rounded shape of a run's steps and reference pass, in the order of their
/// keys; the same on every rank. Generation, evaluations and rare numbers of tokens are left out.
pub(crate) fn matmuls(config: &Config, outline: &PlanInputs, num_ranks: usize) -> Result<Vec<Matmul>> {
    let survey = &*outline.survey(config)?;
    let counts = counts(config, survey);
    let ComputeConfig { tensor, pipeline, .. } = config.compute;
    let mut found = BTreeMap::new();
    for stage in 0..pipeline {
        let (placement, list) = MemoryPlacement::meta_listing_matmuls(&config.compute, survey.rooms())?;
        let mut mesh = DeviceMesh::new(recorder::group(stage * tensor, num_ranks).0, &config.compute)?;
        let mut add = |batch: &MicroBatch| {
            let tokens = batch.forest.num_tokens();
            for product in list.take() {
                let is_of_tokens = product.tokens() == Some(tokens);
                let own = [tokens];
                let counts = if is_of_tokens { &counts[..] } else { &own };
                for &count in counts {
                    let product = if is_of_tokens { product.with_tokens(count) } else { product.rounded() };
                    found.insert(product.key(), product);
                }
            }
        };
        if config.reference.kind == ReferenceKind::Precompute {
            for batch in &survey.reference.largest {
                let mut one = std::iter::once(Ok(batch.clone()));
                dry_run::reference_pass(config, outline, &placement, &mut mesh, &mut one, false)?;
                add(batch);
            }
        }
        let (mut scorer, mut learner) = dry_run::load(config, outline, &placement, &mut mesh)?;
        for batch in survey.train.largest.iter().chain([&survey.typical]) {
            step(&mut scorer, &mut learner, &mut mesh, batch, TWO)?;
            add(batch);
        }
    }
    Ok(found.into_values().collect())
}

/// Returns the rounded numbers of tokens of a run's micro-batches that have most of its tokens.
fn counts(config: &Config, survey: &BatchStatistics) -> Vec<usize> {
    if config.online.is_some() {
        // Completions have any length; micro-batches are filled with them.
        return token_counts(survey.train.room.tokens);
    }
    let mut tokens: BTreeMap<usize, usize> = BTreeMap::new();
    for &count in survey.steps.iter().flatten() {
        *tokens.entry(rounded(count)).or_default() += count;
    }
    let mut counts: Vec<(usize, usize)> = tokens.into_iter().map(|(count, tokens)| (tokens, count)).collect();
    counts.sort_unstable();
    counts.into_iter().rev().take(COUNTS).map(|(_, count)| count).collect()
}
