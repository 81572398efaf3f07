//! Instructions of AMX in memory: a VEX prefix of three bytes, an opcode, and operands.

/// An instruction with its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instruction {
    /// `ldtilecfg`.
    Configure { from: *const u8 },
    /// `tilerelease`.
    Release,
    /// `tilezero`.
    Zero { tile: usize },
    /// `tileloadd` and `tileloaddt1`; the stride is in bytes.
    Load { tile: usize, from: *const u8, stride: usize },
    /// `tilestored`.
    Store { tile: usize, to: *mut u8, stride: usize },
    /// `tdpbf16ps`.
    Multiply { sums: usize, first: usize, second: usize },
}

/// General registers of a stopped thread.
pub(crate) struct Registers {
    /// By number in an instruction.
    by_number: [u64; 16],
    /// Address of the next instruction.
    pub(crate) next: *const u8,
}

impl Registers {
    pub(crate) fn of(context: &libc::ucontext_t) -> Self {
        const ORDER: [libc::c_int; 16] = [
            libc::REG_RAX,
            libc::REG_RCX,
            libc::REG_RDX,
            libc::REG_RBX,
            libc::REG_RSP,
            libc::REG_RBP,
            libc::REG_RSI,
            libc::REG_RDI,
            libc::REG_R8,
            libc::REG_R9,
            libc::REG_R10,
            libc::REG_R11,
            libc::REG_R12,
            libc::REG_R13,
            libc::REG_R14,
            libc::REG_R15,
        ];
        let general = &context.uc_mcontext.gregs;
        Self {
            by_number: ORDER.map(|register| general[register as usize].cast_unsigned()),
            next: general[libc::REG_RIP as usize].cast_unsigned() as *const u8,
        }
    }
}

/// Returns the next instruction and its length in bytes, or `None` if it is not one of these.
///
/// # Safety
/// An instruction is there.
pub(crate) unsafe fn decode(registers: &Registers) -> Option<(Instruction, usize)> {
    /// Marks a VEX prefix of three bytes.
    const VEX: u8 = 0xc4;
    /// Opcodes that follow the bytes 0f 38.
    const MAP: u8 = 2;
    let at = registers.next;
    // SAFETY: the caller's promise; a byte is read only where those before it say that there is one.
    let byte = |offset: usize| unsafe { at.add(offset).read() };
    if byte(0) != VEX || byte(1) & 0x1f != MAP {
        return None;
    }
    let (extensions, rest) = (!byte(1), byte(2));
    // W and L are zero in all of them.
    if rest & 0x84 != 0 {
        return None;
    }
    let (third, prefix) = (usize::from(!rest >> 3 & 0xf), rest & 3);
    let (opcode, operands) = (byte(3), byte(4));
    let (kind, middle, last) = (operands >> 6, usize::from(operands >> 3 & 7), usize::from(operands & 7));
    let is_memory = kind != 3;
    let short = |instruction| Some((instruction, 5));
    let long = |make: &dyn Fn(*mut u8, usize) -> Instruction| {
        // SAFETY: as above.
        let address = unsafe { Address::decode(at.add(4), extensions, registers) };
        Some((make(address.start, address.index), 4 + address.length))
    };
    match (opcode, prefix, is_memory) {
        (0x49, 0, true) => long(&|from, _| Instruction::Configure { from }),
        (0x49, 0, false) if operands == 0xc0 => short(Instruction::Release),
        (0x49, 3, false) => short(Instruction::Zero { tile: middle }),
        // With a hint (1) or without (3).
        (0x4b, 1 | 3, true) => long(&|from, stride| Instruction::Load { tile: middle, from, stride }),
        (0x4b, 2, true) => long(&|to, stride| Instruction::Store { tile: middle, to, stride }),
        (0x5c, 2, false) => short(Instruction::Multiply { sums: middle, first: last, second: third }),
        _ => None,
    }
}

/// A memory operand.
struct Address {
    /// Base and displacement.
    start: *mut u8,
    /// Scaled index, which tiles take as the distance between rows.
    index: usize,
    /// Bytes of the operand in the instruction.
    length: usize,
}

impl Address {
    /// # Safety
    /// A memory operand is there: one byte, or more as it says.
    unsafe fn decode(at: *const u8, extensions: u8, registers: &Registers) -> Self {
        // SAFETY: the caller's promise.
        let byte = |offset: usize| unsafe { at.add(offset).read() };
        let register = |low: u8, extension: u8| {
            registers.by_number[usize::from(low & 7 | (extensions >> extension & 1) << 3)]
        };
        let kind = byte(0) >> 6;
        let has_index = byte(0) & 7 == 4;
        let mut length = 1 + usize::from(has_index);
        let low = if has_index { byte(1) } else { byte(0) };
        // Register 4, the stack pointer, cannot be an index.
        let index_number = low >> 3 & 7 | (extensions >> 6 & 1) << 3;
        let index = match has_index && index_number != 4 {
            true => registers.by_number[usize::from(index_number)] << (low >> 6),
            false => 0,
        };
        // Base 5 without a displacement is none.
        let has_base = kind != 0 || low & 7 != 5;
        let base = if has_base { register(low, 5) } else { 0 };
        let displacement = match kind {
            1 => {
                length += 1;
                i64::from(byte(length - 1).cast_signed())
            }
            _ if kind == 2 || !has_base => {
                length += 4;
                let bytes = [byte(length - 4), byte(length - 3), byte(length - 2), byte(length - 1)];
                i64::from(i32::from_le_bytes(bytes))
            }
            _ => 0,
        };
        // Without an index byte, base 5 counts from the end of the instruction.
        let origin = if has_base || has_index { base } else { at as u64 + length as u64 };
        Self { start: origin.wrapping_add_signed(displacement) as *mut u8, index: index as usize, length }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(bytes: &[u8]) -> Option<(Instruction, usize)> {
        let mut by_number = [0; 16];
        for (number, register) in by_number.iter_mut().enumerate() {
            *register = 0x1000 * (number as u64 + 1);
        }
        // SAFETY: the bytes are a whole instruction.
        unsafe { decode(&Registers { by_number, next: bytes.as_ptr() }) }
    }

    fn address(number: usize) -> *mut u8 {
        (0x1000 * (number + 1)) as *mut u8
    }

    /// Encodings of GNU's assembler.
    #[test]
    fn operands_are_read_as_assemblers_write_them() {
        let known: [(&[u8], Instruction); 11] = [
            // ldtilecfg [rax]; ldtilecfg [r12 + 8]
            (&[0xc4, 0xe2, 0x78, 0x49, 0x00], Instruction::Configure { from: address(0) }),
            (
                &[0xc4, 0xc2, 0x78, 0x49, 0x44, 0x24, 0x08],
                Instruction::Configure { from: address(12).wrapping_add(8) },
            ),
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release),
            // tilezero tmm3
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xd8], Instruction::Zero { tile: 3 }),
            // tileloadd tmm6, [rdx + rcx]; [r8 + r9 + 64]; [rbp + r12 - 8]; [r13 + rsi * 2 + 1024]
            (
                &[0xc4, 0xe2, 0x7b, 0x4b, 0x34, 0x0a],
                Instruction::Load { tile: 6, from: address(2), stride: 0x2000 },
            ),
            (
                &[0xc4, 0x82, 0x7b, 0x4b, 0x74, 0x08, 0x40],
                Instruction::Load { tile: 6, from: address(8).wrapping_add(64), stride: 0xa000 },
            ),
            (
                &[0xc4, 0xa2, 0x7b, 0x4b, 0x74, 0x25, 0xf8],
                Instruction::Load { tile: 6, from: address(5).wrapping_sub(8), stride: 0xd000 },
            ),
            (
                &[0xc4, 0xc2, 0x7b, 0x4b, 0x8c, 0x75, 0x00, 0x04, 0x00, 0x00],
                Instruction::Load { tile: 1, from: address(13).wrapping_add(1024), stride: 0xe000 },
            ),
            // tileloaddt1 tmm4, [rax + rbx]
            (
                &[0xc4, 0xe2, 0x79, 0x4b, 0x24, 0x18],
                Instruction::Load { tile: 4, from: address(0), stride: 0x4000 },
            ),
            // tilestored [rdi + rsi], tmm2
            (
                &[0xc4, 0xe2, 0x7a, 0x4b, 0x14, 0x37],
                Instruction::Store { tile: 2, to: address(7), stride: 0x7000 },
            ),
            // tdpbf16ps tmm1, tmm4, tmm7
            (&[0xc4, 0xe2, 0x42, 0x5c, 0xcc], Instruction::Multiply { sums: 1, first: 4, second: 7 }),
        ];
        for (bytes, instruction) in known {
            assert_eq!(decoded(bytes), Some((instruction, bytes.len())), "{bytes:02x?}");
        }
    }

    #[test]
    fn other_instructions_are_left_alone() {
        // ud2; vfmadd231ps; tdpbssd, whose numbers are whole; sttilecfg [rax].
        let others: [&[u8]; 4] = [
            &[0x0f, 0x0b, 0x90, 0x90, 0x90],
            &[0xc4, 0xe2, 0x75, 0xb8, 0xc2],
            &[0xc4, 0xe2, 0x43, 0x5e, 0xcc],
            &[0xc4, 0xe2, 0x79, 0x49, 0x00],
        ];
        for bytes in others {
            assert_eq!(decoded(bytes), None, "{bytes:02x?}");
        }
    }
}
