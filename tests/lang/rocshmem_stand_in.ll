; A stand-in for rocSHMEM's device library: the C names that the primitives need; its functions are visible in the code
; of a kernel. Like ROCSHMEM_CTX_DEFAULT, the variable exists in every module and is initialized by the host.

@ROCSHMEM_CTX_DEFAULT = addrspace(1) externally_initialized global [2 x i64] zeroinitializer

; Prevents the compiler from specializing these functions, all of whose calls it sees.
@llvm.compiler.used = appending global [6 x ptr] [
  ptr @rocshmem_putmem_nbi_wg, ptr @rocshmem_uint64_atomic_set, ptr @rocshmem_fence, ptr @rocshmem_quiet,
  ptr @rocshmem_my_pe, ptr @rocshmem_n_pes
], section "llvm.metadata"

define void @rocshmem_putmem_nbi_wg(ptr %dest, ptr %source, i64 %nelems, i32 %pe) #0 {
  %context = load ptr, ptr addrspace(1) @ROCSHMEM_CTX_DEFAULT
  call void asm sideeffect "; put $0 $1 $2 $3 $4", "v,v,v,v,v"(ptr %context, ptr %dest, ptr %source, i64 %nelems, i32 %pe)
  ret void
}

define void @rocshmem_uint64_atomic_set(ptr %dest, i64 %value, i32 %pe) #0 {
  call void asm sideeffect "; set $0 $1 $2", "v,v,v"(ptr %dest, i64 %value, i32 %pe)
  ret void
}

define void @rocshmem_fence() #0 {
  call void asm sideeffect "; rocshmem fence", ""()
  ret void
}

define void @rocshmem_quiet() #0 {
  call void asm sideeffect "; rocshmem quiet", ""()
  ret void
}

define i32 @rocshmem_my_pe() #0 {
  %pe = call i32 asm sideeffect "; my pe $0", "=v"()
  ret i32 %pe
}

define i32 @rocshmem_n_pes() #0 {
  %count = call i32 asm sideeffect "; n pes $0", "=v"()
  ret i32 %count
}

attributes #0 = { noinline nounwind convergent }
