{{/* What Ray Serve runs: the application of router/serve_app.py, which starts the pools as actors. */}}
{{- define "pd.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.router.httpPort }}
applications:
  - name: pd-cluster
    route_prefix: /
    import_path: router.serve_app:build
    args:
      config: /etc/pd-cluster/cluster.toml
      num_replicas: {{ .Values.rayService.serveReplicas }}
      max_ongoing_requests: {{ .Values.rayService.maxOngoingRequests }}
      drain_s: {{ .Values.router.drain.timeoutSeconds }}
{{- end -}}

{{/* (root, component, values, GPUs) */}}
{{- define "pd.rayPod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $v := index . 2 -}}
{{- $gpus := index . 3 -}}
{{- $router := $root.Values.router -}}
{{- $gpu := ternary (dict $root.Values.decode.gpus.resourceName $gpus) dict (gt $gpus 0) -}}
metadata:
  labels:
    {{- include "pd.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
  annotations:
    checksum/config: {{ include "pd.clusterFile" $root | sha256sum }}
spec:
  serviceAccountName: {{ include "pd.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "pd.podSecurityContext" $root | nindent 4 }}
  containers:
    - name: {{ $component }}
      image: {{ include "pd.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      env:
        - name: RAY_USAGE_STATS_ENABLED
          value: "0"
        {{- include "pd.env" $root | nindent 8 }}
        {{- with $root.Values.decode.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if eq $component "ray-head" }}
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: client
          containerPort: 10001
        {{- end }}
        - name: serve
          containerPort: {{ $router.httpPort }}
      {{- if eq $component "ray-worker" }}
      lifecycle:
        preStop:
          exec:
            command: [ray, stop]
      {{- end }}
      resources:
        requests:
          {{- toYaml (merge (deepCopy $gpu) (default dict $v.resources.requests)) | nindent 10 }}
        limits:
          {{- toYaml (merge (deepCopy $gpu) (default dict $v.resources.limits)) | nindent 10 }}
      securityContext:
        {{- include "pd.containerSecurityContext" list | nindent 8 }}
      volumeMounts:
        {{- include "pd.volumeMounts" $root | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        {{- if or $router.apiKey.existingSecret $router.adminKey.existingSecret }}
        - name: keys
          mountPath: /etc/pd-cluster-keys
          readOnly: true
        {{- end }}
        {{- if $router.grpc.tls.existingSecret }}
        - name: grpc-tls
          mountPath: /etc/pd-cluster-grpc-tls
          readOnly: true
        {{- end }}
  volumes:
    {{- include "pd.volumes" (list $root $root.Values.decode.tmpSizeLimit) | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $root.Values.rayService.shm.sizeLimit }}
    {{- with include "pd.keyVolumes" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The router's own secrets, for whatever runs a router. */}}
{{- define "pd.keyVolumes" -}}
{{- $v := .Values.router -}}
{{- if or $v.apiKey.existingSecret $v.adminKey.existingSecret }}
- name: keys
  projected:
    defaultMode: 0440
    sources:
      {{- range $file, $key := dict "api-key" $v.apiKey "admin-key" $v.adminKey }}
      {{- if $key.existingSecret }}
      - secret:
          name: {{ $key.existingSecret }}
          items:
            - key: {{ $key.key }}
              path: {{ $file }}
      {{- end }}
      {{- end }}
{{- end }}
{{- if and $v.grpc.enabled $v.grpc.tls.existingSecret }}
- name: grpc-tls
  secret:
    secretName: {{ $v.grpc.tls.existingSecret }}
    defaultMode: 0440
{{- end }}
{{- end -}}
