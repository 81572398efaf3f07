//! Functions of CUDA graphs: copies and kernels of a captured stream are kept, and run when their graph is
//! launched. Clearing memory ends a capture, as in CUDA what a graph cannot have does.

use std::ffi::c_int;
use std::sync::Arc;

use super::{Gpu, INVALID_VALUE, OK, on_gpu};
use crate::cuda::nvidia::raw::{GraphFunctions, Opaque};

/// Work of a graph.
pub(super) type Works = Vec<Arc<dyn Fn() + Send + Sync>>;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURE_UNSUPPORTED: c_int = 900;
/// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`.
const CAPTURE_INVALIDATED: c_int = 901;

/// Stream of a capture that has failed.
const FAILED: u64 = 0;

pub(super) fn functions() -> GraphFunctions {
    GraphFunctions { begin_capture, end_capture, instantiate, destroy, launch, destroy_executable }
}

impl Gpu {
    /// Does work now, or keeps it while its stream is captured.
    pub(super) fn do_or_keep(&mut self, stream: u64, work: impl Fn() + Send + Sync + 'static) -> c_int {
        match &mut self.captured {
            Some((captured, works)) if *captured == stream => works.push(Arc::new(work)),
            _ => work(),
        }
        OK
    }

    /// Refuses what a captured stream cannot have.
    pub(super) fn refuse_captured(&mut self, stream: u64) -> c_int {
        match &mut self.captured {
            Some((captured, _)) if *captured == stream => {
                *captured = FAILED;
                CAPTURE_UNSUPPORTED
            }
            _ => OK,
        }
    }
}

unsafe extern "C" fn begin_capture(stream: Opaque, mode: c_int) -> c_int {
    assert_eq!(mode, 2, "kernels may be loaded");
    on_gpu(|gpu| {
        assert!(gpu.captured.is_none(), "one capture at a time");
        gpu.captured = Some((stream, Works::new()));
        OK
    })
}

unsafe extern "C" fn end_capture(_: Opaque, place: *mut Opaque) -> c_int {
    on_gpu(|gpu| {
        let Some((stream, works)) = gpu.captured.take() else { return INVALID_VALUE };
        if stream == FAILED {
            return CAPTURE_INVALIDATED;
        }
        let graph = gpu.number();
        gpu.graphs.insert(graph, works);
        // SAFETY: as in CUDA.
        unsafe { place.write(graph) };
        OK
    })
}

unsafe extern "C" fn instantiate(place: *mut Opaque, graph: Opaque, flags: u64) -> c_int {
    assert_eq!(flags, 0);
    on_gpu(|gpu| {
        let Some(works) = gpu.graphs.get(&graph).cloned() else { return INVALID_VALUE };
        let executable = gpu.number();
        gpu.graphs.insert(executable, works);
        // SAFETY: as in CUDA.
        unsafe { place.write(executable) };
        OK
    })
}

unsafe extern "C" fn destroy(graph: Opaque) -> c_int {
    on_gpu(|gpu| if gpu.graphs.remove(&graph).is_some() { OK } else { INVALID_VALUE })
}

unsafe extern "C" fn destroy_executable(graph: Opaque) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { destroy(graph) }
}

unsafe extern "C" fn launch(graph: Opaque, stream: Opaque) -> c_int {
    on_gpu(|gpu| {
        let Some(works) = gpu.graphs.get(&graph).filter(|_| gpu.streams.contains(&stream)) else {
            return INVALID_VALUE;
        };
        works.iter().for_each(|work| work());
        gpu.calls.push(format!("launch a graph of {}", gpu.graphs[&graph].len()));
        OK
    })
}
