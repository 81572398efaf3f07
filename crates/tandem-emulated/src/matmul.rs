//! Products, by plain loops.

use half::bf16;
use tandem_kernels::DType;
use tandem_kernels::cuda::driver::{Factor, Matmul};

use crate::memory::translate;

/// A number at an address.
///
/// # Safety
/// There is an element of that type.
unsafe fn read(address: u64, index: usize, dtype: DType) -> f32 {
    let address = translate(address) as usize;
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::with_exposed_provenance::<f32>(address).add(index).read(),
            DType::Bf16 => std::ptr::with_exposed_provenance::<bf16>(address).add(index).read().to_f32(),
        }
    }
}

/// The rows of a factor, each along the depth.
///
/// # Safety
/// The factor is there.
unsafe fn rows(factor: &Factor, rows: usize, depth: usize, dtype: DType) -> Vec<f32> {
    let at = |row: usize, k: usize| {
        if factor.along_depth { row * factor.stride + k } else { k * factor.stride + row }
    };
    let place = |i: usize| at(i / depth, i % depth);
    // SAFETY: the caller's promise.
    (0..rows * depth).map(|i| unsafe { read(factor.address, place(i), dtype) }).collect()
}

/// Computes a product.
///
/// # Safety
/// Factors, what is added and room for the result are there.
pub(crate) unsafe fn matmul(product: &Matmul) {
    let [m, n, k] = product.size;
    // SAFETY: the caller's promise.
    let (a, b) = unsafe { (rows(&product.a, m, k, product.dtype), rows(&product.b, n, k, product.dtype)) };
    let (to, stride) = product.d;
    for i in 0..m {
        for j in 0..n {
            let mut lanes = [0f32; 16];
            let (x, y) = (&a[i * k..(i + 1) * k], &b[j * k..(j + 1) * k]);
            let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
            for (x, y) in x.iter().zip(y) {
                for lane in 0..16 {
                    lanes[lane] += x[lane] * y[lane];
                }
            }
            let mut sum = lanes.iter().sum::<f32>();
            sum += x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum::<f32>();
            if let Some((c, stride)) = product.c {
                // SAFETY: the caller's promise.
                sum += unsafe { read(c, i * stride + j, product.d_type) };
            }
            let address = translate(to) as usize;
            // SAFETY: the caller's promise.
            unsafe {
                match product.d_type {
                    DType::F32 => {
                        std::ptr::with_exposed_provenance_mut::<f32>(address).add(i * stride + j).write(sum);
                    }
                    DType::Bf16 => {
                        let place =
                            std::ptr::with_exposed_provenance_mut::<bf16>(address).add(i * stride + j);
                        place.write(bf16::from_f32(sum));
                    }
                }
            }
        }
    }
}
