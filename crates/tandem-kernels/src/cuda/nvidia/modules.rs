//! Loaded kernels of a GPU: a file is compiled, or read from the cache, when its first kernel is
//! needed.

use std::collections::HashMap;
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, PoisonError};

use super::cache::{Cache, Key};
use super::compiler::Compiler;
use super::context::Context;
use super::raw::result::CUDA_ERROR_NOT_FOUND;
use super::raw::{FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, FUNC_SHARED_SIZE_BYTES, Opaque};
use crate::Result;
use crate::cuda::driver::{Function, Source};
use crate::cuda::failed;

/// Held while a thread uses the cache and compiles.
static COMPILING: Mutex<()> = Mutex::new(());

/// Loaded files.
pub(super) struct Modules {
    context: Arc<Context>,
    pub(super) compiler: Compiler,
    cache: Cache,
    /// Compilation target.
    target: String,
    /// By the file's name.
    loaded: Mutex<HashMap<&'static str, Opaque>>,
}

impl Modules {
    pub(super) fn new(context: &Arc<Context>, compiler: Compiler, cache: Cache) -> Result<Self> {
        let target = compiler.target(context.properties.capability)?;
        Ok(Self { context: context.clone(), compiler, cache, target, loaded: Mutex::default() })
    }

    /// Returns a kernel by file and name, allowed to use all shared memory of a block.
    pub(super) fn function(&self, source: &'static Source, name: &str) -> Result<Function> {
        let module = self.module(source)?;
        let text = CString::new(name).map_err(|_| failed(source.name, format!("no kernel {name:?}")))?;
        let (mut function, mut shared) = (0, 0);
        self.context.enter()?;
        // SAFETY: the module is loaded, the name ends in zero, and the function is written to where
        // it is.
        let outcome = unsafe {
            (self.context.cuda.functions.module_function)(&raw mut function, module, text.as_ptr())
        };
        if outcome == CUDA_ERROR_NOT_FOUND {
            return Err(failed(source.name, format!("there is no kernel {name} in this file")));
        }
        self.context.cuda.check(name, outcome)?;
        // SAFETY: the function was just found; the number is written to where it is.
        self.context.call(name, |cuda| unsafe {
            (cuda.function_attribute)(&raw mut shared, FUNC_SHARED_SIZE_BYTES, function)
        })?;
        let left = self.context.properties.shared_memory as c_int - shared;
        // SAFETY: the function was just found.
        self.context.call(name, |cuda| unsafe {
            (cuda.set_function_attribute)(function, FUNC_MAX_DYNAMIC_SHARED_SIZE_BYTES, left)
        })?;
        Ok(Function(function))
    }

    /// Loads all kernels of a file. The driver else loads a kernel when it is first needed, and may wait for
    /// the GPU then.
    pub(super) fn load_all(&self, source: &'static Source) -> Result<()> {
        let module = self.module(source)?;
        let Some(driver) = &self.context.cuda.load else { return Ok(()) };
        let mut count = 0;
        // SAFETY: the module is loaded; the number is written to where it is.
        self.context.call(source.name, |_| unsafe { (driver.count)(&raw mut count, module) })?;
        let mut functions = vec![0; count as usize];
        self.context.call(source.name, |_| {
            // SAFETY: as above, and the list has room for as many.
            unsafe { (driver.list)(functions.as_mut_ptr(), count, module) }
        })?;
        functions.into_iter().try_for_each(|function| {
            // SAFETY: the function is one of the module's.
            self.context.call(source.name, |_| unsafe { (driver.load)(function) })
        })
    }

    fn module(&self, source: &'static Source) -> Result<Opaque> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&module) = loaded.get(source.name) {
            return Ok(module);
        }
        let key = Key::new(source, &self.target, self.compiler.version());
        // A cached image that the driver rejects is compiled anew, too.
        let known = || self.cache.get(source, key).and_then(|image| self.load(source, image).ok());
        // If threads of several GPUs need a file at once, one compiles it (NVRTC serialises anyway)
        // and the others find it in the cache.
        let turn = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match known() {
            Some(module) => module,
            None => {
                let image = self.compiler.compile(source, &self.target, &[])?.image;
                self.cache.put(source, key, &image);
                self.load(source, image)?
            }
        };
        drop(turn);
        loaded.insert(source.name, module);
        Ok(module)
    }

    fn load(&self, source: &Source, mut image: Vec<u8>) -> Result<Opaque> {
        let what = format!("loading {} for {}", source.name, self.target);
        // PTX is a null-terminated text.
        image.push(0);
        let mut module = 0;
        self.context.call(&what, |cuda| {
            // SAFETY: the image is whole, and the module is written to where it is; the driver
            // copies the image.
            unsafe { (cuda.load_module)(&raw mut module, image.as_ptr().cast()) }
        })?;
        Ok(module)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        // A kernel may still run.
        self.context.settle();
        for module in self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            // SAFETY: the module was loaded once, and nothing of it runs any more.
            unsafe {
                (self.context.cuda.functions.unload_module)(*module);
            }
        }
    }
}
