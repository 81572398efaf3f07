//! Plan of GEMMs of one shape: cuBLASLt's descriptions, and the chosen algorithm.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::raw::{
    BlasFunctions, DESC_TRANSA, DESC_TRANSB, Heuristic, NOT_SUPPORTED, PREF_MAX_WORKSPACE_BYTES,
    PREF_MIN_ALIGNMENT_BYTES, PREF_REDUCTION_SCHEME_MASK, REDUCTION_COMPUTE_TYPE, SUCCESS, data_type, status,
};
use super::shape::{Layout, Shape};
use crate::Result;
use crate::cuda::driver::{Algorithm, FactorType};
use crate::cuda::failed;
use crate::cuda::nvidia::raw::Opaque;

/// Workspace of algorithms in bytes: NVIDIA's advice for Hopper. Less would only exclude some.
pub(in crate::cuda) const WORKSPACE: usize = 32 << 20;

pub(super) struct Plan {
    library: Arc<BlasFunctions>,
    pub(super) desc: Opaque,
    /// Layouts of A, B, C and D.
    pub(super) layouts: [Opaque; 4],
    pub(super) algorithm: Algorithm,
    pub(super) workspace: usize,
}

impl Plan {
    /// Describes products of a shape. `shared` is the algorithm of the rounded shape, which is taken if
    /// the library accepts it for this one. The GPU must be current.
    pub(super) fn new(
        library: &Arc<BlasFunctions>,
        handle: Opaque,
        shape: &Shape,
        shared: &Algorithm,
    ) -> Result<Self> {
        let mut plan = Self::describe(library, shape)?;
        let chosen = match plan.accept(handle, shared) {
            Some(workspace) => (*shared, workspace),
            None => plan.heuristics(handle, shape, 1)?[0],
        };
        (plan.algorithm, plan.workspace) = chosen;
        Ok(plan)
    }

    /// Describes products of a shape by this algorithm; `None` if the library refuses it. The GPU must
    /// be current.
    pub(super) fn by(
        library: &Arc<BlasFunctions>,
        handle: Opaque,
        shape: &Shape,
        algorithm: &Algorithm,
    ) -> Result<Option<Self>> {
        let mut plan = Self::describe(library, shape)?;
        let Some(workspace) = plan.accept(handle, algorithm) else { return Ok(None) };
        (plan.algorithm, plan.workspace) = (*algorithm, workspace);
        Ok(Some(plan))
    }

    /// Returns up to `most` algorithms of cuBLASLt's heuristic for a shape, at least one. The GPU must
    /// be current.
    pub(super) fn algorithms(
        library: &Arc<BlasFunctions>,
        handle: Opaque,
        shape: &Shape,
        most: usize,
    ) -> Result<Vec<Algorithm>> {
        let found = Self::describe(library, shape)?.heuristics(handle, shape, most)?;
        Ok(found.into_iter().map(|(algorithm, _)| algorithm).collect())
    }

    fn describe(library: &Arc<BlasFunctions>, shape: &Shape) -> Result<Self> {
        let mut plan = Self {
            library: library.clone(),
            desc: 0,
            layouts: [0; 4],
            algorithm: Algorithm::default(),
            workspace: 0,
        };
        let scale_type = data_type(FactorType::F32);
        // SAFETY: the handle is written to where it is; `drop` gives it back.
        check("describing a product", unsafe {
            (library.create_desc)(&raw mut plan.desc, shape.compute_type(), scale_type)
        })?;
        for (place, layout) in plan.layouts.iter_mut().zip(shape.layouts()) {
            let Layout { rows, cols, stride, data_type } = layout;
            // SAFETY: as above.
            let outcome = unsafe { (library.create_layout)(place, data_type, rows, cols, stride) };
            check("describing a matrix", outcome)?;
        }
        for (attribute, operation) in [DESC_TRANSA, DESC_TRANSB].into_iter().zip(shape.operations()) {
            set(library.set_desc, plan.desc, attribute, &operation)?;
        }
        Ok(plan)
    }

    /// Returns the bytes that an algorithm needs, if it does for this shape.
    fn accept(&self, handle: Opaque, algorithm: &Algorithm) -> Option<usize> {
        let ([a, b, c, d], mut found) = (self.layouts, Heuristic::default());
        // SAFETY: all handles exist; the result is written to where it is.
        let outcome = unsafe {
            (self.library.check)(handle, self.desc, a, b, c, d, std::ptr::from_ref(algorithm), &raw mut found)
        };
        (outcome == SUCCESS && found.state == SUCCESS && found.workspace <= WORKSPACE)
            .then_some(found.workspace)
    }

    /// Returns up to `most` algorithms of the heuristic and the bytes that each needs; at least one.
    fn heuristics(&self, handle: Opaque, shape: &Shape, most: usize) -> Result<Vec<(Algorithm, usize)>> {
        let preference = Preference::new(&self.library)?;
        preference.set(PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE as u64))?;
        // Otherwise algorithms might add parts of the depth into the result in its own type and in
        // arbitrary order.
        preference.set(PREF_REDUCTION_SCHEME_MASK, &REDUCTION_COMPUTE_TYPE)?;
        for (attribute, bytes) in PREF_MIN_ALIGNMENT_BYTES.into_iter().zip(shape.alignments) {
            preference.set(attribute, &bytes)?;
        }
        let [a, b, c, d] = self.layouts;
        let (mut found, mut count) = (vec![Heuristic::default(); most], 0);
        // SAFETY: all handles exist, with room for as many results as are requested.
        let outcome = unsafe {
            (self.library.heuristic)(
                handle,
                self.desc,
                a,
                b,
                c,
                d,
                preference.handle,
                most as c_int,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        found.truncate(usize::try_from(count).unwrap_or(0));
        // Why nothing is of use is told of the first.
        let outcome = if outcome == SUCCESS {
            found.first().map_or(NOT_SUPPORTED, |first| first.state)
        } else {
            outcome
        };
        let [m, n, k] = shape.size;
        let (of, into) = (shape.dtype, shape.d_type);
        check(&format!("finding out how to multiply [{m},{k}] by [{k},{n}] of {of} into {into}"), outcome)?;
        let usable = found.into_iter().filter(|found| found.state == SUCCESS);
        Ok(usable.map(|found| (found.algorithm, found.workspace)).collect())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each was made once, and is not used any more.
        unsafe {
            for layout in self.layouts.into_iter().filter(|&layout| layout != 0) {
                (self.library.destroy_layout)(layout);
            }
            if self.desc != 0 {
                (self.library.destroy_desc)(self.desc);
            }
        }
    }
}

/// Constraints on algorithms.
struct Preference<'a> {
    library: &'a BlasFunctions,
    handle: Opaque,
}

impl<'a> Preference<'a> {
    fn new(library: &'a BlasFunctions) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: the handle is written to where it is; `drop` gives it back.
        check("describing a choice", unsafe { (library.create_preference)(&raw mut handle) })?;
        Ok(Self { library, handle })
    }

    fn set<T: Copy>(&self, attribute: c_int, value: &T) -> Result<()> {
        set(self.library.set_preference, self.handle, attribute, value)
    }
}

impl Drop for Preference<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made once, and is not used any more.
        unsafe {
            (self.library.destroy_preference)(self.handle);
        }
    }
}

/// A function that sets an attribute of a description.
type Setter = unsafe extern "C" fn(Opaque, c_int, *const c_void, usize) -> c_int;

fn set<T: Copy>(setter: Setter, of: Opaque, attribute: c_int, value: &T) -> Result<()> {
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the description is there. The library compares the size with the attribute's, and
    // copies the value.
    check("describing a product", unsafe { setter(of, attribute, value, size_of::<T>()) })
}

/// Converts a status to an error.
pub(super) fn check(what: &str, outcome: c_int) -> Result<()> {
    if outcome == SUCCESS { Ok(()) } else { Err(failed(format!("cuBLASLt: {what}"), status(outcome))) }
}
