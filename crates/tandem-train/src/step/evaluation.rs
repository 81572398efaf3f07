//! Loss and metrics over held-out rows: means over all pairs (or tokens), whatever the
//! micro-batches were.

use std::time::Instant;

use tandem_data::token_cache::TokenCache;

use crate::Result;
use crate::metrics::{Record, Split};
use crate::parallel::DeviceMesh;
use crate::recipe::MicroBatcher;
use crate::step::TrainStep;

/// One evaluation as a line of the log.
pub(crate) fn evaluation_record(
    scorer: &mut TrainStep,
    mesh: &mut DeviceMesh,
    batcher: &mut MicroBatcher,
    cache: &TokenCache,
    step: u64,
) -> Result<Record> {
    let began = Instant::now();
    let rows: Vec<u32> = (0..cache.num_rows() as u32).collect();
    let (data_rank, data_size) = (mesh.data().rank(), mesh.data().size());
    let share = batcher.share(cache, &rows, data_rank, data_size);
    let sums = scorer.evaluate(mesh, &share, &mut |part| batcher.build(cache, part))?;
    let mut record = Record::new(step, Split::Eval);
    sums.report(&mut record);
    record.set_count("num_rows", cache.num_rows() as u64);
    record.set("time", began.elapsed().as_secs_f64());
    Ok(record)
}
