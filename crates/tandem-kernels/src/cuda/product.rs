//! TODO.

use super::{Cuda, driver, failed, source};
use crate::Result;
use crate::cpu::Product;

pub(super) static SOURCE: driver::Source = source!("product.cu");

pub(crate) fn run(cuda: &Cuda, product: Product) -> Result<()> {
    let _ = (cuda, product);
    Err(failed("product", "not written"))
}
