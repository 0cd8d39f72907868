; Wrappers of rocSHMEM's device functions, in LLVM assembly. Triton links this file into a kernel before the device library.
;
; Triton can call only external functions that take numbers and return a value, and every thread calls them. rocSHMEM's
; functions take pointers and mostly return nothing, and a signal is set once by every calling thread. These wrappers
; convert the types, and let one thread set the signal. Names and types are from src/device/rocshmem_wrapper.cc in
; ROCm/rocm-systems, projects/rocshmem.
;
; All threads of a workgroup call a wrapper together. After the barrier, the fences of all threads hold for the first one.

declare void @rocshmem_putmem_nbi_wg(ptr, ptr, i64, i32) #1
declare void @rocshmem_uint64_atomic_set(ptr, i64, i32) #1
declare void @rocshmem_fence() #1
declare void @rocshmem_quiet() #1
declare i32 @rocshmem_my_pe() #1
declare i32 @rocshmem_n_pes() #1
declare i32 @llvm.amdgcn.workitem.id.x() #2
declare void @llvm.amdgcn.s.barrier() #1

define i32 @tdkernels_rocshmem_put_nbi_block(i64 %dst, i64 %src, i64 %num_bytes, i32 %pe) #0 {
  %to = inttoptr i64 %dst to ptr
  %from = inttoptr i64 %src to ptr
  fence release                            ; the network card may read data that any thread of the program has
  call void @llvm.amdgcn.s.barrier() #1    ; stored, as soon as the first thread starts the put
  call void @rocshmem_putmem_nbi_wg(ptr %to, ptr %from, i64 %num_bytes, i32 %pe) #1
  ret i32 0
}

define i32 @tdkernels_rocshmem_signal_set(i64 %signal, i64 %value, i32 %pe) #0 {
entry:
  %thread = call i32 @llvm.amdgcn.workitem.id.x()
  %is_first = icmp eq i32 %thread, 0
  br i1 %is_first, label %first, label %end
first:
  %to = inttoptr i64 %signal to ptr
  call void @rocshmem_uint64_atomic_set(ptr %to, i64 %value, i32 %pe) #1
  br label %end
end:
  ret i32 0
}

define i32 @tdkernels_rocshmem_fence() #0 {
  call void @rocshmem_fence() #1
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier() #1
  fence syncscope("workgroup") acquire
  ret i32 0
}

define i32 @tdkernels_rocshmem_quiet() #0 {
  call void @rocshmem_quiet() #1
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier() #1
  fence syncscope("workgroup") acquire
  ret i32 0
}

define i32 @tdkernels_rocshmem_my_pe() #0 {
  %pe = call i32 @rocshmem_my_pe() #1
  ret i32 %pe
}

define i32 @tdkernels_rocshmem_n_pes() #0 {
  %count = call i32 @rocshmem_n_pes() #1
  ret i32 %count
}

attributes #0 = { alwaysinline convergent nounwind }
attributes #1 = { convergent nounwind }
attributes #2 = { nounwind readnone }
