//! Algorithms of a run's matmuls on GPUs: timed once before the first step, the same on every rank, and
//! kept with the run.
//!
//! The first rank decides, by timing or from the record of the run, and the others get its choice. After
//! that nothing is timed: shapes without a choice take the library's first, which depends on nothing but
//! the library.

use std::collections::HashMap;
use std::time::Instant;

use tandem_comm::{ProcessGroup, Reduction};
use tandem_kernels::Backend;
use tandem_kernels::cuda::autotune::{Autotuner, Choice};
use tandem_kernels::cuda::driver::{Drivers, Matmul, MatmulChoice};

use super::agreement;
use crate::config::Config;
use crate::events::{Event, Observer};
use crate::placement::{MemoryPlacement, gpus};
use crate::plan::PlanInputs;
use crate::plan::matmuls::matmuls;
use crate::{Result, TrainError};

/// Choices of the first rank, before this rank's GPU has seen them.
pub(super) struct Proposed {
    choices: Vec<MatmulChoice>,
    /// Matmuls of the run, if this rank has listed them.
    products: Option<Vec<Matmul>>,
}

/// Takes the choices of the record, if the run has one, or makes them, while GPUs are empty. Collective.
///
/// # Errors
/// A GPU fails, or another rank.
pub(super) fn propose(
    config: &Config,
    outline: &PlanInputs,
    recorded: Option<Vec<MatmulChoice>>,
    group: &mut ProcessGroup,
    observer: &mut dyn Observer,
) -> Result<Proposed> {
    let (mut own, mut products) = (Vec::new(), None);
    if group.rank() == 0 && config.compute.devices.backend() == Backend::Cuda {
        own = match recorded {
            Some(recorded) => recorded,
            None if config.compute.matmul_autotune => {
                let listed = products.insert(matmuls(config, outline, group.size())?);
                let driver = gpus::driver(config, 0)?;
                driver.map_or(Ok(Vec::new()), |driver| time(driver, listed, observer))?
            }
            None => Vec::new(),
        };
    }
    if group.size() == 1 {
        return Ok(Proposed { choices: own, products });
    }
    let text: String = own.iter().map(|choice| format!("{}\n{}\n", choice.shape, choice.algorithm)).collect();
    let text = agreement::text_of(&text, 0, group)?;
    let lines: Vec<&str> = text.lines().collect();
    let choices = lines.chunks_exact(2).map(|lines| {
        let algorithm = lines[1].parse().map_err(|reason| TrainError::Mismatch { reason })?;
        Ok(MatmulChoice { shape: lines[0].to_owned(), algorithm })
    });
    Ok(Proposed { choices: choices.collect::<Result<_>>()?, products })
}

/// Chooses the algorithm of each shape, by timing where none is kept on disk.
fn time(driver: Drivers, products: &[Matmul], observer: &mut dyn Observer) -> Result<Vec<MatmulChoice>> {
    let began = Instant::now();
    let autotuner = Autotuner::new(driver, products)?;
    let mut choices = Vec::with_capacity(products.len());
    for product in products {
        match autotuner.choose(product)? {
            Choice::Chosen(choice) => choices.push(choice),
            Choice::NotOffered => {}
            Choice::NotKept => {
                observer.event(&Event::Warning(
                    "compute.matmul_autotune: the cache folder of kernels cannot be written, so the next run could not \
                     repeat a choice of algorithms; matmuls take the library's first choice. TANDEM_CACHE=/a/folder names \
                     another folder",
                ));
                return Ok(Vec::new());
            }
        }
    }
    tracing::info!(
        "algorithms of {} shapes of matmuls in {:.1} s",
        choices.len(),
        began.elapsed().as_secs_f64()
    );
    Ok(choices)
}

impl Proposed {
    /// Sets the choices on the GPU of every rank. Those that the library of a rank refuses are dropped on
    /// all of them, with a warning. Collective.
    ///
    /// # Errors
    /// Another rank fails.
    pub(super) fn agree(
        self,
        config: &Config,
        outline: &PlanInputs,
        placement: &mut MemoryPlacement,
        group: &mut ProcessGroup,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let Self { choices, products } = self;
        if choices.is_empty() {
            return Ok(());
        }
        let device = &placement.device;
        let mut refused = vec![0u8; choices.len()];
        if device.backend() == Backend::Cuda {
            let products = products.map_or_else(|| matmuls(config, outline, group.size()), Ok)?;
            let by_key: HashMap<String, &Matmul> =
                products.iter().map(|product| (product.key(), product)).collect();
            for (refused, choice) in refused.iter_mut().zip(&choices) {
                // A record may have shapes that the run has no more.
                if let Some(product) = by_key.get(&choice.shape) {
                    *refused = u8::from(!device.accepts_algorithm(product, &choice.algorithm)?);
                }
            }
        }
        if group.size() > 1 {
            group.all_reduce(&mut refused, Reduction::Max)?;
        }
        let (mut taken, mut first, mut count) = (Vec::with_capacity(choices.len()), None, 0);
        for (choice, refused) in choices.into_iter().zip(refused) {
            if refused == 0 {
                taken.push(choice);
            } else {
                count += 1;
                first.get_or_insert(choice.shape);
            }
        }
        if let Some(first) = first {
            let total = taken.len() + count;
            observer.event(&Event::Warning(&format!(
                "cuBLASLt refuses the algorithms that the run has used for {count} of {total} shapes of matmuls ({first} is \
                 the first): another version of the library or another GPU computes here. They take its first choice, and the \
                 bits may differ from those of the run until now"
            )));
        }
        device.set_matmul_choices(&taken);
        placement.matmuls = taken.into();
        Ok(())
    }
}
