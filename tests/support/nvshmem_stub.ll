; Stub of NVSHMEM's device functions as declared in tdkernels.lang.nvshmem, to compile kernels without the library.
; The functions are neither inlined nor eliminated, so that a kernel's PTX shows its calls.
target datalayout = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"

@nvshmem_stub_seen = internal addrspace(1) global i64 0

define i32 @nvshmemx_putmem_nbi_block(i64 %dst, i64 %src, i64 %bytes, i32 %pe) #0 {
  store volatile i64 %src, ptr addrspace(1) @nvshmem_stub_seen
  ret i32 0
}

define i32 @nvshmemx_putmem_signal_nbi_block(i64 %dst, i64 %src, i64 %bytes, i64 %signal, i64 %value, i32 %op, i32 %pe) #0 {
  store volatile i64 %src, ptr addrspace(1) @nvshmem_stub_seen
  ret i32 0
}

define i32 @nvshmemx_signal_op(i64 %signal, i64 %value, i32 %op, i32 %pe) #0 {
  store volatile i64 %value, ptr addrspace(1) @nvshmem_stub_seen
  ret i32 0
}

define i64 @nvshmem_signal_wait_until(i64 %signal, i32 %how, i64 %value) #0 {
  %word = inttoptr i64 %signal to ptr addrspace(1)
  %seen = load volatile i64, ptr addrspace(1) %word
  ret i64 %seen
}

define i32 @nvshmem_fence() #0 {
  store volatile i64 1, ptr addrspace(1) @nvshmem_stub_seen
  ret i32 0
}

define i32 @nvshmem_quiet() #0 {
  store volatile i64 2, ptr addrspace(1) @nvshmem_stub_seen
  ret i32 0
}

define i32 @nvshmem_my_pe() #0 {
  %seen = load volatile i64, ptr addrspace(1) @nvshmem_stub_seen
  %pe = trunc i64 %seen to i32
  ret i32 %pe
}

define i32 @nvshmem_n_pes() #0 {
  %seen = load volatile i64, ptr addrspace(1) @nvshmem_stub_seen
  %pes = trunc i64 %seen to i32
  ret i32 %pes
}

attributes #0 = { noinline nounwind }
