//! Functions of the driver, but for memory.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::{
    ANSWERS, CURRENT, Gpu, INVALID_CONTEXT, INVALID_IMAGE, INVALID_VALUE, OK, OUT_OF_MEMORY, SHARED,
    STATIC_SHARED, gpus, memory, on_gpu,
};
use crate::cuda::nvidia::raw::{DeviceHandle, DriverFunctions, LoadFunctions, Opaque};

const NOT_FOUND: c_int = 500;

pub(super) fn functions() -> DriverFunctions {
    DriverFunctions {
        init,
        driver_version,
        error_name,
        error_string,
        device_count,
        device,
        device_name,
        device_memory,
        device_attribute,
        pci_bus_id,
        can_access_peer,
        retain_context,
        release_context,
        set_context,
        synchronize_context,
        memory_info: memory::memory_info,
        granularity: memory::granularity,
        reserve_addresses: memory::reserve,
        free_addresses: memory::free_addresses,
        create_memory: memory::create,
        release_memory: memory::release,
        map_memory: memory::map,
        unmap_memory: memory::unmap,
        set_access: memory::set_access,
        register_host: memory::register,
        unregister_host: memory::unregister,
        copy: memory::copy,
        copy_2d: memory::copy_2d,
        set_bytes: memory::set_bytes,
        create_stream,
        destroy_stream,
        synchronize_stream,
        wait_event,
        create_event,
        destroy_event,
        record_event,
        synchronize_event,
        elapsed,
        load_module,
        unload_module,
        module_function,
        function_attribute,
        set_function_attribute,
        launch,
    }
}

pub(super) fn load_functions() -> LoadFunctions {
    LoadFunctions { count: function_count, list: list_functions, load: load_function }
}

/// Gives an answer.
///
/// # Safety
/// It is written to where it is.
unsafe fn answer<T>(place: *mut T, value: T) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { place.write(value) };
    OK
}

unsafe extern "C" fn init(_: c_uint) -> c_int {
    ANSWERS.get().init
}

unsafe extern "C" fn driver_version(place: *mut c_int) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { answer(place, ANSWERS.get().version) }
}

unsafe extern "C" fn error_name(code: c_int, place: *mut *const c_char) -> c_int {
    let name = match code {
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        _ => c"CUDA_ERROR_INVALID_VALUE",
    };
    // SAFETY: as in CUDA.
    unsafe { answer(place, name.as_ptr()) }
}

unsafe extern "C" fn error_string(_: c_int, place: *mut *const c_char) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { answer(place, c"the stand-in's words".as_ptr()) }
}

unsafe extern "C" fn device_count(place: *mut c_int) -> c_int {
    // SAFETY: as in CUDA.
    unsafe { answer(place, ANSWERS.get().count) }
}

unsafe extern "C" fn device(place: *mut DeviceHandle, ordinal: c_int) -> c_int {
    // SAFETY: as in CUDA. A handle need not be the number.
    unsafe { answer(place, ordinal + 100) }
}

pub(super) fn of_device<T>(device: DeviceHandle, ask: impl FnOnce(&mut Gpu) -> T) -> Option<T> {
    gpus().get_mut(&((device - 100) as usize)).map(ask)
}

unsafe extern "C" fn device_name(place: *mut c_char, len: c_int, _: DeviceHandle) -> c_int {
    let name = c"Stand-in".to_bytes_with_nul();
    assert!(name.len() <= len as usize);
    // SAFETY: as in CUDA; there is room.
    unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), place, name.len()) };
    OK
}

unsafe extern "C" fn device_memory(place: *mut usize, device: DeviceHandle) -> c_int {
    // SAFETY: as in CUDA.
    of_device(device, |gpu| unsafe { answer(place, gpu.kind.memory) }).unwrap_or(INVALID_VALUE)
}

unsafe extern "C" fn device_attribute(place: *mut c_int, attribute: c_int, device: DeviceHandle) -> c_int {
    let value = of_device(device, |gpu| match attribute {
        11 => c_int::MAX,
        16 => 108,
        38 => 1 << 20,
        75 => gpu.kind.capability.0 as c_int,
        76 => gpu.kind.capability.1 as c_int,
        91 => c_int::from(gpu.kind.host_pointers),
        97 => SHARED,
        102 => 1,
        other => panic!("attribute {other}"),
    });
    // SAFETY: as in CUDA.
    value.map_or(INVALID_VALUE, |value| unsafe { answer(place, value) })
}

unsafe extern "C" fn pci_bus_id(place: *mut c_char, len: c_int, device: DeviceHandle) -> c_int {
    let text = format!("{:04x}:{:02x}:00.0\0", device >> 8, device & 0xff);
    assert!(text.len() <= len as usize);
    // SAFETY: as in CUDA; there is room.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), place, text.len()) };
    OK
}

unsafe extern "C" fn can_access_peer(place: *mut c_int, device: DeviceHandle, other: DeviceHandle) -> c_int {
    let [one, other] = [device, other].map(|device| of_device(device, |gpu| gpu.kind.board));
    // SAFETY: as in CUDA.
    unsafe { answer(place, c_int::from(one.is_some() && one == other)) }
}

unsafe extern "C" fn retain_context(place: *mut Opaque, device: DeviceHandle) -> c_int {
    of_device(device, |gpu| gpu.contexts += 1);
    // SAFETY: as in CUDA.
    unsafe { answer(place, device as Opaque) }
}

unsafe extern "C" fn release_context(device: DeviceHandle) -> c_int {
    of_device(device, |gpu| gpu.contexts -= 1);
    OK
}

unsafe extern "C" fn set_context(context: Opaque) -> c_int {
    CURRENT.set(Some((context - 100) as usize));
    OK
}

unsafe extern "C" fn synchronize_context() -> c_int {
    on_gpu(|gpu| {
        gpu.log("synchronize all".to_owned());
        OK
    })
}

unsafe extern "C" fn create_stream(place: *mut Opaque, flags: c_uint) -> c_int {
    assert_eq!(flags, 1, "a stream that waits for no other");
    on_gpu(|gpu| {
        let stream = gpu.number();
        gpu.streams.push(stream);
        // SAFETY: as in CUDA.
        unsafe { answer(place, stream) }
    })
}

unsafe extern "C" fn destroy_stream(stream: Opaque) -> c_int {
    on_gpu(|gpu| {
        gpu.streams.retain(|&one| one != stream);
        gpu.log("destroy stream".to_owned());
        OK
    })
}

unsafe extern "C" fn synchronize_stream(stream: Opaque) -> c_int {
    on_gpu(|gpu| {
        assert!(gpu.streams.contains(&stream), "NVIDIA's driver crashes where a stream has ended");
        gpu.log("synchronize stream".to_owned());
        OK
    })
}

unsafe extern "C" fn wait_event(stream: Opaque, event: Opaque, _: c_uint) -> c_int {
    on_gpu(
        |gpu| {
            if gpu.events.contains_key(&event) && gpu.streams.contains(&stream) { OK } else { INVALID_VALUE }
        },
    )
}

unsafe extern "C" fn create_event(place: *mut Opaque, flags: c_uint) -> c_int {
    assert_eq!(flags, 0, "an event that tells time");
    on_gpu(|gpu| {
        let event = gpu.number();
        gpu.events.insert(event, None);
        // SAFETY: as in CUDA.
        unsafe { answer(place, event) }
    })
}

unsafe extern "C" fn destroy_event(event: Opaque) -> c_int {
    on_gpu(|gpu| if gpu.events.remove(&event).is_some() { OK } else { INVALID_VALUE })
}

unsafe extern "C" fn record_event(event: Opaque, stream: Opaque) -> c_int {
    on_gpu(|gpu| {
        if !gpu.streams.contains(&stream) {
            return INVALID_VALUE;
        }
        let now = gpu.number();
        gpu.events.insert(event, Some(now));
        OK
    })
}

unsafe extern "C" fn synchronize_event(event: Opaque) -> c_int {
    on_gpu(|gpu| if gpu.events.contains_key(&event) { OK } else { INVALID_VALUE })
}

unsafe extern "C" fn elapsed(place: *mut f32, from: Opaque, to: Opaque) -> c_int {
    on_gpu(|gpu| {
        let time = |event| gpu.events.get(event).copied().flatten();
        let (Some(from), Some(to)) = (time(&from), time(&to)) else { return INVALID_VALUE };
        // SAFETY: as in CUDA.
        unsafe { answer(place, (to - from) as f32) }
    })
}

unsafe extern "C" fn load_module(place: *mut Opaque, image: *const c_void) -> c_int {
    // SAFETY: the stand-in's code is a text, which ends in zero.
    let image = unsafe { CStr::from_ptr(image.cast()) }.to_str().unwrap_or_default();
    on_gpu(|gpu| {
        let (major, minor) = gpu.kind.capability;
        let own = format!("CODE sm_{major}{minor}\n");
        let Some(text) = image.strip_prefix(&own).or_else(|| image.strip_prefix("PTX\n")) else {
            return INVALID_IMAGE;
        };
        let module = gpu.number();
        gpu.modules.insert(module, text.to_owned());
        gpu.log("load".to_owned());
        // SAFETY: as in CUDA.
        unsafe { answer(place, module) }
    })
}

unsafe extern "C" fn unload_module(module: Opaque) -> c_int {
    on_gpu(|gpu| if gpu.modules.remove(&module).is_some() { OK } else { INVALID_VALUE })
}

unsafe extern "C" fn module_function(place: *mut Opaque, module: Opaque, name: *const c_char) -> c_int {
    // SAFETY: as in CUDA.
    let name = unsafe { CStr::from_ptr(name) }.to_str().unwrap();
    on_gpu(|gpu| {
        if !gpu.modules.get(&module).is_some_and(|text| text.contains(&format!("KERNEL({name},"))) {
            return NOT_FOUND;
        }
        let function = gpu.number();
        gpu.functions.insert(function, (name.to_owned(), 48 << 10));
        // SAFETY: as in CUDA.
        unsafe { answer(place, function) }
    })
}

/// Returns the kernels of a module.
fn kernels(gpu: &Gpu, module: Opaque) -> Vec<String> {
    let parts = gpu.modules.get(&module).map(|text| text.split("KERNEL(").skip(1)).into_iter().flatten();
    parts.filter_map(|part| part.split_once(',')).map(|(name, _)| name.to_owned()).collect()
}

unsafe extern "C" fn function_count(place: *mut c_uint, module: Opaque) -> c_int {
    // SAFETY: as in CUDA.
    on_gpu(|gpu| unsafe { answer(place, kernels(gpu, module).len() as c_uint) })
}

unsafe extern "C" fn list_functions(place: *mut Opaque, count: c_uint, module: Opaque) -> c_int {
    on_gpu(|gpu| {
        for (index, name) in kernels(gpu, module).into_iter().take(count as usize).enumerate() {
            let function = gpu.number();
            gpu.functions.insert(function, (name, 48 << 10));
            // SAFETY: as in CUDA.
            unsafe { answer(place.add(index), function) };
        }
        OK
    })
}

unsafe extern "C" fn load_function(function: Opaque) -> c_int {
    on_gpu(|gpu| match gpu.functions.get(&function).map(|(name, _)| format!("load {name}")) {
        Some(call) => {
            gpu.log(call);
            OK
        }
        None => INVALID_VALUE,
    })
}

unsafe extern "C" fn function_attribute(place: *mut c_int, attribute: c_int, _: Opaque) -> c_int {
    assert_eq!(attribute, 1);
    // SAFETY: as in CUDA.
    unsafe { answer(place, STATIC_SHARED) }
}

unsafe extern "C" fn set_function_attribute(function: Opaque, attribute: c_int, value: c_int) -> c_int {
    assert_eq!(attribute, 8);
    on_gpu(|gpu| match gpu.functions.get_mut(&function) {
        Some(function) if value + STATIC_SHARED <= SHARED => {
            function.1 = value;
            OK
        }
        _ => INVALID_VALUE,
    })
}

/// Every kernel of the stand-in takes an address, a 32-bit number and a 64-bit one, and writes both
/// numbers there.
unsafe extern "C" fn launch(
    function: Opaque,
    x: c_uint,
    y: c_uint,
    z: c_uint,
    threads: c_uint,
    _: c_uint,
    _: c_uint,
    shared: c_uint,
    stream: Opaque,
    arguments: *mut *mut c_void,
    _: *mut *mut c_void,
) -> c_int {
    on_gpu(|gpu| {
        let Some((name, may)) = gpu.functions.get(&function).cloned() else { return INVALID_VALUE };
        if shared as c_int > may {
            return INVALID_VALUE;
        }
        gpu.log(format!("launch {name} [{x}, {y}, {z}] of {threads}, {shared} shared"));
        // SAFETY: as in CUDA.
        let (at, small, large) = unsafe {
            let at = **arguments.cast::<*const u64>();
            (at, (*arguments.add(1)).cast::<u32>().read(), (*arguments.add(2)).cast::<u64>().read())
        };
        gpu.do_or_keep(stream, move || {
            let to = std::ptr::with_exposed_provenance_mut::<u64>(at as usize);
            // SAFETY: as in CUDA.
            unsafe {
                to.write(u64::from(small));
                to.add(1).write(large);
            }
        })
    })
}
